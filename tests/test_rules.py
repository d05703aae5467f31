"""Every rule against a reference in plain Python, a loop over positions, written from the rule's definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.canvas import Canvas, Request
from infer.observation import Observation
from infer.rules import best_BL, pack_left
from infer.when.lps import Lps
from infer.when.oracle import Oracle
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.full import Full
from infer.where.lbs import Lbs, cut_at_gap
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
