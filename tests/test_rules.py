"""Every rule against a reference in plain Python, a loop over positions, written from the rule's definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbones.packing import pack_left
from infer.canvas import Canvas, Request
from infer.filters import DilatedSpacing, NoEosFirst
from infer.observation import Observation
from infer.rules import Method, best_BL, order_BL
from infer.when.dilated import Dilated, DilatedCounts, plan
from infer.when.entropy_bound import EntropyBound
from infer.when.factor import Factor
from infer.when.klass import Klass
from infer.when.local_leap import LocalLeap
from infer.when.lps import Lps
from infer.when.oracle import Oracle
from infer.when.stable_prefix import FixedPrefix, ScatteredMargin, StablePrefix, delimiter_ids
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.full import Full
from infer.where.lbs import Lbs, cut_at_gap
from infer.where.suffix import Suffix
from routers.lps import Features

# Few distinct values, so that ties are common.
VALUES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 1.0])


@st.composite
def scenes(draw, rows=3):
    """Rows of (values, candidate flags, top-1, reference), each row with at least one candidate."""
    length = draw(st.integers(1, 24))
    scene = []
    for _ in range(rows):
        values = draw(st.lists(VALUES, min_size=length, max_size=length))
        flags = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        flags[draw(st.integers(0, length - 1))] = True
        top1 = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        reference = draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        scene.append((values, flags, top1, reference))
    return scene


def observation(scene, asked):
    values = torch.tensor([row[0] for row in scene])
    top1 = torch.tensor([row[2] for row in scene])
    return Observation(
        asked, top1, 10, confidence_BL=values, second_BL=0.1 * values, entropy_BL=1 - values, margin_BL=values
    )


def canvas_of(length, rows, reference=None):
    requests = [Request(str(i), (1,), tuple(reference[i]) if reference else None) for i in range(rows)]
    return Canvas.of(requests, length, mask_id=9, eos_id=2, device="cpu")


def best_of(values, flags):
    return max((i for i in range(len(flags)) if flags[i]), key=lambda i: (values[i], -i))


def check(rule, scene, expected):
    flags = torch.tensor([row[1] for row in scene])
    canvas = canvas_of(flags.shape[1], len(scene), [row[3] for row in scene])
    chosen = rule.choose(canvas, observation(scene, flags), flags)
    for row, (values, candidate, top1, reference) in enumerate(scene):
        wanted = expected(values, candidate, top1, reference)
        assert {i for i, c in enumerate(chosen[row].tolist()) if c} == wanted
        assert wanted and all(candidate[i] for i in wanted)


@settings(max_examples=100, deadline=None)
@given(scene=scenes(), k=st.integers(1, 30))
def test_top_k(scene, k):
    def expected(values, flags, *_):
        order = sorted((i for i in range(len(flags)) if flags[i]), key=lambda i: (-values[i], i))
        return set(order[:k])

    for ranking in ("confidence", "entropy", "margin"):
        check(TopK(k, ranking), scene, expected)


@settings(max_examples=100, deadline=None)
@given(scene=scenes(), tau=VALUES)
def test_threshold(scene, tau):
    tau = torch.tensor(tau).item()  # float32, as the statistics

    def expected(values, flags, *_):
        sure = {i for i in range(len(flags)) if flags[i] and torch.tensor(values[i]).item() >= tau}
        return sure or {best_of(values, flags)}

    check(Threshold(tau), scene, expected)


@settings(max_examples=100, deadline=None)
@given(scene=scenes())
def test_oracle(scene):
    def expected(values, flags, top1, reference):
        right = {i for i in range(len(flags)) if flags[i] and top1[i] == reference[i]}
        return right or {best_of(values, flags)}

    check(Oracle(), scene, expected)


KL_STEPS = 3  # divergences that `blocks` draws for every position


# The rules below read the block as well: how large it is, what of it is committed, and how long it has been open.
@st.composite
def blocks(draw, rows=3):
    """A batch of open blocks with holes in the region and committed members; statistics independent of each other."""
    length = draw(st.integers(1, 64))
    batch = []
    for _ in range(rows):
        block = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        masked = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        sure = draw(st.integers(0, length - 1))
        block[sure] = masked[sure] = True
        statistics = {
            name: draw(st.lists(values, min_size=length, max_size=length))
            for name, values in (
                ("confidence", VALUES),
                ("second", st.sampled_from([0.0, 0.04, 0.1])),
                ("entropy", st.sampled_from([0.0, 0.02, 0.1, 0.1, 0.7, 4.0])),
                ("margin", st.sampled_from([0.0, 0.5, 1.0, 2.0, 30.0])),
                ("kl", st.tuples(*[st.sampled_from([0.0, 0.001, 0.02, 9.0, math.inf])] * KL_STEPS)),
                ("top1", st.integers(0, 3)),
            )
        }
        batch.append({"block": block, "masked": masked, "step": draw(st.integers(0, 9)), **statistics})
    return batch


def flags_of(batch, name):
    return torch.tensor([row[name] for row in batch])


def scene_of(batch, kl_steps=KL_STEPS):
    """Canvas and observation of `blocks`."""
    canvas = canvas_of(len(batch[0]["block"]), len(batch))
    canvas.open_blocks(torch.ones(len(batch), dtype=torch.bool), flags_of(batch, "block"))
    canvas.masked_BL = flags_of(batch, "masked")
    canvas.block_step_B = flags_of(batch, "step")
    seen = Observation(
        canvas.candidates_BL,
        flags_of(batch, "top1"),
        10,
        confidence_BL=flags_of(batch, "confidence"),
        second_BL=flags_of(batch, "second"),
        entropy_BL=flags_of(batch, "entropy"),
        margin_BL=flags_of(batch, "margin"),
        kl_BLH=flags_of(batch, "kl")[..., KL_STEPS - kl_steps :],
    )
    return canvas, seen


class Tokens:
    """A tokenizer of four tokens; token 1 is a delimiter, 3 is special."""

    all_special_ids = (3,)

    def __len__(self):
        return 4

    def batch_decode(self, ids):
        return [("a", " .", "b.", ".")[i] for (i,) in ids]


class Toy:
    name, vocab_size, device, tokenizer = "toy", 10, "cpu", Tokens()


def float32(value):
    return torch.tensor(value).item()


def compare(rule, batch, expected):
    """`expected(row, candidates)`: the positions that a rule commits in one row, in plain Python."""
    canvas, seen = scene_of(batch, rule.kl_steps)
    rule.bind(Toy(), canvas.gen_length)
    chosen = rule.choose(canvas, seen, canvas.candidates_BL)
    # Another order of the rows gives the same, row by row.
    turned, turned_seen = scene_of(batch[::-1], rule.kl_steps)
    turned.lot_BL = canvas.lot_BL.flip(0)
    assert torch.equal(rule.choose(turned, turned_seen, turned.candidates_BL).flip(0), chosen)
    for i, row in enumerate(batch):
        row = {**row, "lot": canvas.lot_BL[i].tolist()}
        candidates = [j for j in range(len(row["block"])) if row["block"][j] and row["masked"][j]]
        wanted = expected(row, candidates)
        assert {j for j, c in enumerate(chosen[i].tolist()) if c} == set(wanted)
        assert wanted and set(wanted) <= set(candidates)


def ranked(row, candidates, ranking):
    score = {"confidence": row["confidence"], "random": row["lot"]}
    score["entropy"] = [-h for h in row["entropy"]]
    score["margin"] = (torch.tensor(row["confidence"]) - torch.tensor(row["second"])).tolist()
    return sorted(candidates, key=lambda j: (-score[ranking][j], j))


RANKING = st.sampled_from(["confidence", "entropy", "margin", "random"])
CASES = settings(max_examples=50, deadline=None)


@CASES
@given(batch=blocks(), k=st.integers(1, 9), ranking=RANKING)
def test_top_k_by_every_ranking(batch, k, ranking):
    compare(TopK(k, ranking), batch, lambda row, candidates: ranked(row, candidates, ranking)[:k])


def test_the_margin_of_a_ranking_is_of_probabilities():
    """0.5 against 0.3 leads by more probability than 0.3 against 0.15, by fewer nats of logits."""
    canvas = canvas_of(2, 1)
    first, second = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.3, 0.15]])
    seen = Observation(
        canvas.masked_BL, torch.zeros(1, 2).long(), 10,
        confidence_BL=first, second_BL=second, entropy_BL=torch.ones(1, 2), margin_BL=(first / second).log(),
    )  # fmt: skip
    for rule in (TopK(1, "margin"), EntropyBound(0.1, "margin")):
        assert {"confidence", "second"} <= rule.needs
        assert rule.choose(canvas, seen, canvas.masked_BL).tolist() == [[True, False]]


@CASES
@given(batch=blocks(), steps=st.integers(1, 40))
def test_top_k_in_steps(batch, steps):
    def expected(row, candidates):
        size = sum(row["block"])
        count = size // steps + (1 if row["step"] < size % steps else 0)
        return ranked(row, candidates, "confidence")[: max(1, count)]

    compare(TopK(steps=steps), batch, expected)


@CASES
@given(batch=blocks(), f=st.sampled_from([0.05, 0.5, 1.0, 3.0]))
def test_factor(batch, f):
    def expected(row, candidates):
        order = ranked(row, candidates, "confidence")
        holds = [n for n in range(1, len(order) + 1) if (n + 1) * (1 - float32(row["confidence"][order[n - 1]])) < f]
        return order[: max(holds, default=1)]

    compare(Factor(f), batch, expected)


@CASES
@given(batch=blocks(), window=st.integers(0, 5), tau=st.sampled_from([0.1, 0.5, 0.9]))
def test_local_leap(batch, window, tau):
    def expected(row, candidates):
        c = {j: float32(row["confidence"][j]) for j in candidates}
        anchors = {j for j in candidates if c[j] >= 0.93}
        leaps = {j for j in candidates if c[j] >= float32(tau) and any(abs(j - a) <= window for a in anchors)}
        return anchors | leaps or ranked(row, candidates, "confidence")[:1]

    compare(LocalLeap(kappa=0.93, window=window, tau=float32(tau)), batch, expected)


def test_local_leap_warns_where_it_degenerates():
    with pytest.warns(UserWarning, match="kappa=0.5 is below tau=0.75"):
        LocalLeap(kappa=0.5, tau=0.75)


@CASES
@given(
    batch=blocks(),
    gamma=st.sampled_from([0.0, 0.05, 0.2, 1.5]),
    proxy=st.sampled_from(["entropy", "confidence", "margin"]),
)
def test_entropy_bound(batch, gamma, proxy):
    def expected(row, candidates):
        order, total, largest, count = ranked(row, candidates, proxy), 0.0, 0.0, 0
        for j in order:
            bits = float32(row["entropy"][j]) / math.log(2)
            total, largest = total + bits, max(largest, bits)
            if total - largest > gamma:
                break
            count += 1
        return order[: max(1, count)]

    compare(EntropyBound(gamma, proxy), batch, expected)


@CASES
@given(
    batch=blocks(),
    tau=st.sampled_from([0.1, 0.5, 0.95]),
    epsilon=st.sampled_from([0.01, 0.02, 1.0]),
    steps=st.integers(1, KL_STEPS),
    k=st.integers(1, 3),
)
def test_klass(batch, tau, epsilon, steps, k):
    def expected(row, candidates):
        steady = [j for j in candidates if all(float32(kl) < float32(epsilon) for kl in row["kl"][j][-steps:])]
        ready = [j for j in steady if float32(row["confidence"][j]) >= float32(tau)]
        return ready or ranked(row, candidates, "confidence")[:k]

    compare(Klass(float32(tau), float32(epsilon), steps, k), batch, expected)


def rounds_of(size, base, base_skip):
    """DUS's plan from its definition: sets of offsets, round by round."""
    taken, rounds = set(), []
    stride = size // base**base_skip
    while stride >= 1:
        due = {i for i in range(size) if i % stride == 0} - taken
        if due:
            rounds.append(due)
        taken |= due
        stride //= base
    if len(taken) < size:
        rounds.append(set(range(size)) - taken)
    if len(rounds) >= 2 and len(rounds[-1]) < len(rounds[-2]):
        last = rounds.pop()
        rounds[-1] |= last
    return rounds


def test_the_plan_of_dus_is_the_papers():
    assert rounds_of(8, 2, 1) == [{0, 4}, {2, 6}, {1, 3, 5, 7}]  # §3.5, counted from 0
    for size in (2, 4, 8, 16, 32, 64):
        assert len(rounds_of(size, 2, 1)) == math.log2(size)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 200), base=st.integers(2, 5), base_skip=st.integers(0, 3))
def test_plan(size, base, base_skip):
    found = plan(size, base, base_skip)
    assert [{i for i, t in enumerate(found) if t == r} for r in range(max(found) + 1)] == rounds_of(
        size, base, base_skip
    )


@CASES
@given(batch=blocks(), base=st.integers(2, 3), base_skip=st.integers(0, 2), skip=st.sampled_from([None, 0.5, 0.95]))
def test_dilated(batch, base, base_skip, skip):
    def expected(row, candidates):
        block = [j for j in range(len(row["block"])) if row["block"][j]]
        rounds = rounds_of(len(block), base, base_skip)
        planned = {block[i]: t for t, offsets in enumerate(rounds) for i in offsets}
        now = min(row["step"], len(rounds) - 1)
        due = [j for j in candidates if planned[j] <= now]
        if not due:  # everything due is committed already: the next one of the plan
            return [min(candidates, key=lambda j: (planned[j], j))]
        if skip is None or now == len(rounds) - 1:
            return due
        sure = [j for j in due if float32(row["confidence"][j]) >= float32(skip)]
        return sure or ranked(row, due, "confidence")[:1]

    compare(Dilated(base, base_skip, None if skip is None else float32(skip)), batch, expected)


@CASES
@given(batch=blocks(), ranking=RANKING)
def test_dilated_counts(batch, ranking):
    def expected(row, candidates):
        rounds = rounds_of(sum(row["block"]), 2, 1)
        now = min(row["step"], len(rounds) - 1)
        due = sum(len(r) for r in rounds[: now + 1]) - (sum(row["block"]) - len(candidates))
        return ranked(row, candidates, ranking)[: max(1, due)]

    compare(DilatedCounts(ranking=ranking), batch, expected)


def adaptive(row, candidates, alpha, beta):
    """LSP's L' from its definition."""
    margins = [row["margin"][j] for j in candidates]
    n = len(margins)
    low = [min(margins[: j + 1]) for j in range(n)]
    reachable = [j for j in range(1, n + 1) if j == n or low[j] < low[j - 1]]
    shortest, longest = math.ceil(alpha * n), math.floor(beta * n)
    return max((j for j in reachable if shortest <= j <= longest), default=shortest)


ALPHA_BETA = st.sampled_from([(0.25, 0.5), (0.25, 0.75), (0.125, 1.0), (1.0, 1.0)])


@CASES
@given(batch=blocks(), ab=ALPHA_BETA, l_min=st.integers(1, 6), window=st.integers(0, 20), snap=st.booleans())
def test_stable_prefix(batch, ab, l_min, window, snap):
    def expected(row, candidates):
        length = adaptive(row, candidates, *ab)
        if snap:
            ends = [j for j in range(1, length + 1) if row["top1"][candidates[j - 1]] == 1 and length - j <= window]
            length = max(ends, default=0)
        return candidates[: max(l_min, length)]

    compare(StablePrefix(*ab, l_min=l_min, window=window, snap=snap, delimiters="."), batch, expected)


@CASES
@given(batch=blocks(), ab=ALPHA_BETA)
def test_scattered_margin(batch, ab):
    compare(
        ScatteredMargin(*ab),
        batch,
        lambda row, candidates: sorted(candidates, key=lambda j: -row["margin"][j])[: adaptive(row, candidates, *ab)],
    )


@CASES
@given(batch=blocks(), k=st.integers(1, 9))
def test_fixed_prefix(batch, k):
    compare(FixedPrefix(k), batch, lambda row, candidates: candidates[:k])


def test_delimiters_are_tokens_of_delimiters_alone(tokenizer):
    assert delimiter_ids(Tokens(), 10, ".").tolist() == [False, True] + [False] * 8
    flags = delimiter_ids(tokenizer, len(tokenizer), ".,\n")
    found = {tokenizer.decode([i]).strip(" ") for i in flags.nonzero()[:, 0].tolist()}
    assert {".", ",", "\n"} <= found and all(set(text) <= set(".,\n") for text in found)


@CASES
@given(batch=blocks(), g0=st.integers(0, 20), ranking=RANKING)
def test_dilated_spacing(batch, g0, ranking):
    canvas, seen = scene_of(batch)
    chosen_BL = canvas.candidates_BL & (seen.confidence_BL >= 0.5)
    kept_BL = DilatedSpacing(g0, ranking).thin(canvas, seen, chosen_BL)
    for i, row in enumerate(batch):
        row = {**row, "lot": canvas.lot_BL[i].tolist()}
        candidates = [j for j in range(len(row["block"])) if row["block"][j] and row["masked"][j]]
        chosen = [j for j in candidates if row["confidence"][j] >= 0.5]
        gap = max(2, len(candidates) * g0 // sum(row["block"])) if g0 else 0
        kept: list[int] = []
        for j in ranked(row, chosen, ranking):
            if all(abs(j - other) >= gap for other in kept):
                kept.append(j)
        assert {j for j, k in enumerate(kept_BL[i].tolist()) if k} == set(kept)
        assert kept or not chosen


@CASES
@given(batch=blocks())
def test_no_eos_first(batch):
    canvas, seen = scene_of(batch)  # EOS is token 2
    admitted_BL = NoEosFirst().admit(canvas, seen, canvas.candidates_BL)
    for i, row in enumerate(batch):
        candidates = [j for j in range(len(row["block"])) if row["block"][j] and row["masked"][j]]
        others = [j for j in candidates if row["top1"][j] != 2]
        assert {j for j, k in enumerate(admitted_BL[i].tolist()) if k} == set(others or candidates)


def test_suffix_is_everything_after_the_committed_prefix():
    canvas = canvas_of(6, 3)
    canvas.masked_BL = torch.tensor([[0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
    formed = Suffix().form(canvas, None, torch.ones(3, dtype=torch.bool))
    assert formed.int().tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6, [0, 0, 0, 0, 0, 1]]


def test_a_run_from_the_left_in_a_block_with_holes_is_refused(lbs):
    for commit in (StablePrefix(), FixedPrefix()):
        with pytest.raises(ValueError, match="Lbs.*have holes"):
            Method("m", Lbs(lbs), commit)
        with pytest.raises(ValueError, match="DilatedSpacing.*would leave holes"):
            Method("m", Suffix(), commit, filters=[DilatedSpacing()])
        Method("m", Suffix(), commit)


def test_order_puts_candidates_of_no_score_before_the_rest():
    score = torch.tensor([[1.0, -torch.inf, 5.0, -torch.inf]])
    assert order_BL(score, torch.tensor([[True, False, False, True]]))[:, :2].tolist() == [[0, 3]]


@settings(max_examples=60, deadline=None)
@given(scene=scenes(), tau_psi=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_lps(scene, tau_psi, lps):
    """One row and one position at a time through the router, with features computed from their definitions."""
    rule = Lps(lps, tau=0.92, tau_psi=tau_psi)

    def expected(values, flags, *_):
        masked = [i for i in range(len(flags)) if flags[i]]
        scores = router_scores(lps, values, masked, block=range(len(flags)))
        early = {i for i in masked if scores[i] >= tau_psi}
        sure = {i for i in masked if values[i] >= 0.92}
        return early | sure or {best_of(values, flags)}

    flags = torch.tensor([row[1] for row in scene])
    canvas = canvas_of(flags.shape[1], len(scene))
    canvas.open_blocks(torch.ones(len(scene), dtype=torch.bool), torch.ones_like(flags))
    chosen = rule.choose(canvas, observation(scene, flags), flags)
    for row, (values, candidate, *_) in enumerate(scene):
        assert {i for i, c in enumerate(chosen[row].tolist()) if c} == expected(values, candidate)


def router_scores(lps, values, masked, block):
    block = list(block)
    row = [
        [
            block.index(i) / len(block),
            values[i],
            (1 - values[i]) / math.log(10),
            values[i] - 0.1 * values[i],
            len(masked) / len(block),
        ]
        for i in masked
    ]
    features = Features(
        torch.tensor([row]),
        torch.tensor([[block.index(i) for i in masked]]),
        torch.ones(1, len(masked), dtype=torch.bool),
    )
    with torch.no_grad():
        return dict(zip(masked, lps(features).sigmoid()[0].tolist(), strict=True))


def test_lps_ranks_count_committed_members_of_a_block_with_holes(lps):
    """A learned block {1, 2, 5, 9} with 1 committed: ranks are 1, 2, 3 of 4, whatever else the batch holds."""
    block, masked = [1, 2, 5, 9], [2, 5, 9]
    values = [0.1 * i % 1 for i in range(12)]
    flags = torch.zeros(2, 12, dtype=torch.bool)
    flags[0, masked] = True
    flags[1] = True  # a second row with far more candidates
    canvas = canvas_of(12, 2)
    blocks = torch.ones_like(flags)
    blocks[0] = False
    blocks[0, block] = True
    canvas.open_blocks(torch.ones(2, dtype=torch.bool), blocks)
    scene = [(values, None, [0] * 12, None), (values[::-1], None, [0] * 12, None)]
    scores = router_scores(lps, values, masked, block)
    for tau_psi in sorted(scores.values()):
        rule = Lps(lps, tau=1.0, tau_psi=tau_psi - 1e-5)
        chosen = rule.choose(canvas, observation(scene, flags), flags)
        assert {i for i in range(12) if chosen[0, i]} == {i for i in masked if scores[i] >= tau_psi - 1e-5}


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 70), block=st.integers(1, 40))
def test_fixed_blocks_cover_the_region_left_to_right(length, block):
    canvas = canvas_of(length, 1)
    seen = []
    while canvas.masked_BL.any():
        formed = Fixed(block).form(canvas, None, torch.tensor([True]))
        positions = formed[0].nonzero()[:, 0].tolist()
        seen.append(positions)
        canvas.masked_BL[0, positions] = False
    assert [i for positions in seen for i in positions] == list(range(length))
    assert all(len(positions) == block for positions in seen[:-1])


def test_full_block_is_everything():
    assert Full().form(canvas_of(7, 2), None, torch.ones(2, dtype=torch.bool)).all()


@settings(max_examples=200, deadline=None)
@given(selected=st.lists(st.booleans(), min_size=1, max_size=30), g_max=st.integers(1, 6))
def test_cut_at_gap(selected, g_max):
    kept: set[int] = set()
    for i, chosen in enumerate(selected):
        if chosen:
            if kept and i - max(kept) > g_max:
                break
            kept.add(i)
    found = cut_at_gap(torch.tensor([selected]), g_max)
    assert {i for i in range(len(selected)) if found[0, i]} == kept


class FixedScores(torch.nn.Module):
    """Stands in for an LBS router: one logit a position of the region."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, entropy, token, position, valid):
        return self.logits[position]


@pytest.mark.parametrize(
    ("logits", "top1", "masked", "wanted"),
    [
        # Selected 0-3, EOS at 2 is dropped.
        ([1, 1, 1, 1, -1, -1, -1, -1], [0, 0, 2, 0, 0, 0, 0, 0], range(8), {0, 1, 3}),
        # Position 7 is 4 behind 3: beyond g_max = 3.
        ([1, 1, -1, 1, -1, -1, -1, 1], [0] * 8, range(8), {0, 1, 3}),
        # Only one is left: the first four masked ones instead.
        ([1, -1, -1, -1, -1, -1, -1, 1], [0] * 8, (1, 2, 4, 6, 7), {1, 2, 4, 6}),
        # A block may begin anywhere: the first selected position has none before it.
        ([-1, -1, -1, -1, 1, 1, 1, 1], [0] * 8, range(8), {4, 5, 6, 7}),
        # A logit of 0 is pi = 0.5 and selected.
        ([0, 0, -1, -1, -1, -1, -1, -1], [0] * 8, range(8), {0, 1}),
    ],
)
def test_lbs_forms_blocks(lbs, logits, top1, masked, wanted):
    rule = Lbs(lbs, g_max=3, l_min=2, fallback=4)
    rule.router = FixedScores([float(z) for z in logits])
    canvas = canvas_of(8, 2)
    canvas.masked_BL[:] = False
    canvas.masked_BL[:, list(masked)] = True
    seen = Observation(canvas.masked_BL, torch.tensor([top1, top1]), 10, entropy_BL=torch.zeros(2, 8))
    block = rule.form(canvas, seen, torch.tensor([False, True]))
    assert not block[0].any(), "a row that opens no block gets none"
    assert {i for i in range(8) if block[1, i]} == wanted


def test_best_breaks_ties_to_the_left():
    score = torch.tensor([[0.5, 0.9, 0.9, 0.9]])
    assert best_BL(score, torch.tensor([[True, False, True, True]])).tolist() == [[False, False, True, False]]
    assert not best_BL(score, torch.zeros(1, 4, dtype=torch.bool)).any()


def test_pack_left():
    order, valid = pack_left(torch.tensor([[False, True, False, True], [True, True, True, False]]))
    assert valid.tolist() == [[True, True, False], [True, True, True]]
    assert order[0, :2].tolist() == [1, 3] and order[1].tolist() == [0, 1, 2]
    assert len(set(order[0].tolist())) == 3


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda r: Fixed(0), "block_length=0"),
        (lambda r: TopK(0), "k=0"),
        (lambda r: TopK(1, "beauty"), "ranking='beauty'.*confidence"),
        (lambda r: TopK(steps=0), "steps=0"),
        (lambda r: Factor(0), "factor=0"),
        (lambda r: LocalLeap(window=-1), "window=-1"),
        (lambda r: LocalLeap(kappa=1.5), "kappa=1.5"),
        (lambda r: EntropyBound(-0.1), "gamma=-0.1"),
        (lambda r: EntropyBound(proxy="luck"), "proxy='luck'.*entropy"),
        (lambda r: Klass(tau=1.5), "tau=1.5"),
        (lambda r: Klass(epsilon=0.0), "epsilon=0.0"),
        (lambda r: Klass(steps=0), "steps=0"),
        (lambda r: Klass(k=0), "k=0"),
        (lambda r: Dilated(1), "base=1"),
        (lambda r: Dilated(base_skip=-1), "base_skip=-1"),
        (lambda r: Dilated(skip_below=2), "skip_below=2"),
        (lambda r: DilatedCounts(ranking="beauty"), "ranking='beauty'"),
        (lambda r: StablePrefix(0.6, 0.5), "alpha=0.6, beta=0.5"),
        (lambda r: StablePrefix(l_min=0), "l_min=0"),
        (lambda r: ScatteredMargin(0.0, 0.5), "alpha=0.0"),
        (lambda r: FixedPrefix(0), "k=0"),
        (lambda r: DilatedSpacing(-1), "g0=-1"),
        (lambda r: Threshold(-0.1), "tau=-0.1"),
        (lambda r: Threshold(1.1), "tau=1.1"),
        (lambda r: Lps(r[1], tau_psi=2.0), "tau_psi=2.0"),
        (lambda r: Lbs(r[0], g_max=0), "g_max=0"),
        (lambda r: Lbs(r[0], l_min=0), "l_min=0"),
    ],
)
def test_bad_settings_are_named(lbs, lps, make, named):
    with pytest.raises(ValueError, match=named):
        make((lbs, lps))


def test_a_block_is_no_longer_than_the_generation(backbone):
    Fixed(40).bind(backbone, 40)
    with pytest.raises(ValueError, match="block_length=41: longer than gen_length=40"):
        Fixed(41).bind(backbone, 40)
