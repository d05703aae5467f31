"""Routers: sizes, losses and their optima, threshold search, export."""

import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routers.checkpoint import check_fits, router_hash
from routers.config import LBSConfig, LPSConfig, Origin
from routers.lbs import LBS, balanced_cap, lbs_loss
from routers.lps import LPS, Features, lps_loss
from routers.threshold import ThresholdPoint, best_threshold, recall_within, threshold_table

LLADA_8B = Origin("llada_8b", "0", vocab_size=126464, mask_id=126336, gen_length=512, block_length=32)
LLADA_TINY = Origin("llada_tiny", "0", vocab_size=2048, mask_id=3, gen_length=128, block_length=32, vocabulary="v")


def parameters(router):
    return sum(p.numel() for p in router.parameters())


def test_sizes():
    assert parameters(LPS(LPSConfig(LLADA_8B))) == pytest.approx(27_000, rel=0.10)
    assert parameters(LBS(LBSConfig(LLADA_8B, embedding_size=4096))) == pytest.approx(600_000, rel=0.15)
    assert parameters(LBS(LBSConfig(LLADA_TINY, embedding_size=128))) == 193_153


def features(rows=2, width=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Features(
        torch.rand(rows, width, 5, generator=g), torch.arange(width).expand(rows, -1), torch.ones(rows, width).bool()
    )


@pytest.mark.parametrize(
    "changes", [{}, {"encoder": "mlp"}, {"position_embedding": False}, {"features": ("confidence",)}]
)
def test_lps_ablations_run_and_differ_in_size(changes):
    router = LPS(LPSConfig(LLADA_TINY, **changes))
    assert router(features()).shape == (2, 6)
    assert not changes or parameters(router) < parameters(LPS(LPSConfig(LLADA_TINY)))


def test_lps_reads_only_the_features_it_is_given():
    router = LPS(LPSConfig(LLADA_TINY, features=("gap", "confidence"))).eval()
    base, changed = features(), features()
    changed.values_BK5[..., [0, 2, 4]] += 1  # position, entropy and mask ratio
    assert torch.equal(router(base), router(changed))
    changed.values_BK5[..., 3] += 1
    assert not torch.allclose(router(base), router(changed))


def test_lps_attends_and_the_mlp_ablation_does_not():
    for encoder, expected in (("transformer", True), ("mlp", False)):
        torch.manual_seed(0)
        router = LPS(LPSConfig(LLADA_TINY, encoder=encoder))
        base, changed = features(), features()
        changed.values_BK5[:, -1] += 3
        assert (not torch.allclose(router(base)[:, 0], router(changed)[:, 0])) == expected


def test_padding_columns_change_nothing():
    torch.manual_seed(0)
    lps = LPS(LPSConfig(LLADA_TINY)).eval()
    wide = features(rows=2, width=9)
    wide.valid_BK[0, 4:] = False
    narrow = Features(*(t[:1, :4] for t in wide))
    torch.testing.assert_close(lps(wide)[0, :4], lps(narrow)[0])
    lbs = LBS(LBSConfig(LLADA_TINY, embedding_size=8, width=16)).eval()
    lbs.attach_embedding(torch.randn(2048, 8))
    entropy, token, position = torch.rand(2, 9), torch.randint(2048, (2, 9)), torch.arange(9).expand(2, -1)
    padded = lbs(entropy, token, position, wide.valid_BK)
    alone = lbs(entropy[:1, :4], token[:1, :4], position[:1, :4], torch.ones(1, 4).bool())
    torch.testing.assert_close(padded[0, :4], alone[0])


def test_lbs_inputs():
    torch.manual_seed(0)
    table = torch.randn(2048, 8)
    arguments = torch.rand(1, 5), torch.randint(2048, (1, 5)), torch.arange(5)[None], torch.ones(1, 5).bool()
    both = LBS(LBSConfig(LLADA_TINY, embedding_size=8, width=16)).eval()
    both.attach_embedding(table)
    logits = both(*arguments)
    both.cache_embedding(table)
    torch.testing.assert_close(both(*arguments), logits)  # the projected table is the same function
    entropy_only = LBS(LBSConfig(LLADA_TINY, embedding_size=8, inputs="entropy", width=16)).eval()
    other = (arguments[0], arguments[1] + 1, *arguments[2:])
    assert torch.equal(entropy_only(*arguments), entropy_only(*other))
    with pytest.raises(ValueError, match="4 wide, the router's 8"):
        both.attach_embedding(torch.randn(2048, 4))


def test_lbs_loss_is_its_formula_and_has_its_optimum():
    logit = torch.tensor([[0.3, -1.0, 2.0, 5.0]])
    loss = torch.tensor([[0.1, 2.0, 0.4, 9.0]])
    right = torch.tensor([[True, False, True, True]])
    valid = torch.tensor([[True, True, True, False]])
    pi = logit.sigmoid()[0]
    by_hand = (pi[0] * 0.1 + 3 * pi[1] * 2.0 + pi[2] * 0.4) / 3 - 0.5 * (pi[0] + pi[1] + pi[2]) / 3
    torch.testing.assert_close(lbs_loss(logit, loss, right, valid, wrong_weight=3.0, reward=0.5), by_hand)
    # Gradient descent includes a position exactly where w * loss < reward; it may go below zero.
    free = torch.zeros(1, 4, requires_grad=True)
    for _ in range(200):
        value = lbs_loss(free, loss, right, valid, wrong_weight=3.0, reward=0.5)
        (gradient,) = torch.autograd.grad(value, free)
        free = (free - 5 * gradient).detach().requires_grad_()
    assert value < 0
    assert (free[0, :3] > 0).tolist() == [True, False, True]
    assert free[0, 3] == 0


@pytest.mark.parametrize("reward", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("wrong", [0.05, 0.4, 0.9])
def test_a_balanced_cap_pushes_neither_way(reward, wrong):
    """With every logit equal, the loss has no slope along all of them together."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(4, 500, generator=generator) >= wrong
    loss = torch.where(right, 0.05, 6.0) * torch.rand(4, 500, generator=generator)
    cost = (torch.where(right, 1.0, 2.0) * loss).flatten()
    cap = balanced_cap(cost, reward)
    if cost.mean() <= reward:
        assert cap == math.inf
        return
    assert cap > 1 and cost.clamp_max(cap * reward).mean().item() == pytest.approx(reward, rel=1e-5)
    shift = torch.zeros((), requires_grad=True)
    valid = torch.ones_like(right)
    lbs_loss(shift.expand(4, 500), loss, right, valid, wrong_weight=2.0, reward=reward, cap=cap).backward()
    assert abs(shift.grad.item()) < 1e-5


def test_a_cap_bounds_the_cost_and_keeps_what_is_worth_including():
    logit, valid = torch.zeros(1, 3), torch.ones(1, 3).bool()
    loss, right = torch.tensor([[0.2, 9.0, 0.6]]), torch.tensor([[True, True, False]])
    capped = lbs_loss(logit, loss, right, valid, wrong_weight=2.0, reward=0.5, cap=2.0)
    torch.testing.assert_close(capped, 0.5 * torch.tensor((0.2 - 0.5) + (1.0 - 0.5) + (1.0 - 0.5)) / 3)


def test_lps_loss_weighs_negatives():
    logit, right, valid = (
        torch.tensor([[0.7, 0.7, 9.0]]),
        torch.tensor([[True, False, True]]),
        torch.tensor([[1, 1, 0]]),
    )
    p = torch.tensor(0.7).sigmoid()
    by_hand = (-p.log() - 2 * (1 - p).log()) / 2
    torch.testing.assert_close(lps_loss(logit, right, valid.bool(), negative_weight=2.0), by_hand)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 0.8, 0.81, 0.9, 0.95, 0.9999, 1.0]), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_threshold_table_is_its_definition(items):
    scores = torch.tensor([s for s, _ in items], dtype=torch.double)
    right = torch.tensor([r for _, r in items])
    table = threshold_table(scores, right)
    assert len(table) == 250 and table[0].threshold == 0.8 and table[-1].threshold == pytest.approx(0.9999)
    for point in table[::25]:
        accepted = [r for s, r in items if s >= point.threshold]
        positives, negatives = sum(r for _, r in items), sum(not r for _, r in items)
        assert point.recall == pytest.approx(sum(accepted) / max(1, positives))
        assert point.fpr == pytest.approx((len(accepted) - sum(accepted)) / max(1, negatives))


CASES = st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.booleans()), min_size=1, max_size=12)


@given(CASES, st.one_of(st.floats(0, 1), st.integers(1, 11).map(lambda n: 1 / n)))
def test_recall_within_a_false_positive_rate(cases, fpr):
    scores, rights = [s for s, _ in cases], [r for _, r in cases]
    best = 0.0
    for threshold in scores:
        taken = [r for s, r in cases if s >= threshold]
        if (len(taken) - sum(taken)) / max(1, len(cases) - sum(rights)) <= fpr:
            best = max(best, sum(taken) / max(1, sum(rights)))
    assert recall_within(torch.tensor(scores), torch.tensor(rights), fpr) == pytest.approx(best)


def test_best_threshold():
    def point(threshold, recall, fpr):
        return ThresholdPoint(threshold, recall, fpr, 1.0)

    table = [point(0.8, 0.9, 0.05), point(0.85, 0.7, 0.01), point(0.9, 0.7, 0.005), point(0.95, 0.5, 0.0)]
    assert best_threshold(table, 0.01).threshold == 0.9
    assert best_threshold(table, 0.05).threshold == 0.8
    with pytest.raises(ValueError, match="fpr_budget=0.001.*FPR 0.0050 at threshold 0.9000"):
        best_threshold(table[:3], 0.001)


def test_export_round_trip(tmp_path, lbs, lps, backbone):
    for original in (lbs, lps):
        router = copy.deepcopy(original)
        router.config = replace(router.config, metrics={"a": 0.5}, training={"seed": 1})
        again = type(router).from_pretrained(router.save_pretrained(tmp_path / router.config.kind))
        assert again.config == router.config
        assert all(torch.equal(again.state_dict()[k], v) for k, v in router.state_dict().items())
        assert sorted(p.name for p in (tmp_path / router.config.kind).iterdir()) == ["config.json", "model.safetensors"]


def test_the_hash_is_of_what_decides_the_router(tmp_path, lps):
    def saved(name, **changes):
        router = copy.deepcopy(lps)
        router.config = replace(router.config, **changes)
        return router.save_pretrained(tmp_path / name)

    base = router_hash(saved("base"))
    assert router_hash(saved("reports", metrics={"a": 1.0}, training={"seed": 3})) == base
    assert router_hash(saved("threshold", threshold=0.99)) != base
    other = copy.deepcopy(lps)
    with torch.no_grad():
        other.head.bias += 1
    assert router_hash(other.save_pretrained(tmp_path / "weights")) != base


def test_damaged_exports_are_refused(tmp_path, lps):
    with pytest.raises(ValueError, match="no config.json"):
        LPS.from_pretrained(tmp_path / "nothing")
    folder = lps.save_pretrained(tmp_path / "lps")
    with pytest.raises(ValueError, match="kind 'lps' found where 'lbs'"):
        LBS.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema_version 99"):
        LPS.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "width": 64, "heads": 4}))
    with pytest.raises(ValueError, match="damaged or incomplete"):
        LPS.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        LPS.from_pretrained(folder)


def test_a_router_of_another_backbone_or_length_is_refused():
    here = SimpleNamespace(name="here", fingerprint="0", vocab_size=2048, vocabulary="v")
    there = SimpleNamespace(name="there", fingerprint="1", vocab_size=2048, vocabulary="v")
    renamed = SimpleNamespace(name="renamed", fingerprint="3", vocab_size=2048, vocabulary="w")
    big = SimpleNamespace(name="big", fingerprint="2", vocab_size=4096, vocabulary="x")
    lbs, lps = LBSConfig(LLADA_TINY, embedding_size=8), LPSConfig(LLADA_TINY)
    for config in (lbs, lps):
        check_fits(config, here, 128)
        with pytest.raises(ValueError, match="backbone llada_tiny/0, not there/1: router.allow_transfer=true lets it"):
            check_fits(config, there, 128)
        with pytest.raises(ValueError, match="gen_length 128, not 64"):
            check_fits(config, here, 64)
    for elsewhere in (big, renamed):
        check_fits(lps, elsewhere, 64, allow_transfer=True)
    check_fits(lbs, there, 128, allow_transfer=True)
    with pytest.raises(ValueError, match="vocabulary 2048, not 4096: LBS does not transfer"):
        check_fits(lbs, big, 128, allow_transfer=True)
    with pytest.raises(ValueError, match="vocabulary v, not w, which has other tokens: LBS does not transfer"):
        check_fits(lbs, renamed, 128, allow_transfer=True)
    with pytest.raises(ValueError, match="gen_length 128, not 64: LBS does not transfer"):
        check_fits(lbs, there, 64, allow_transfer=True)
    # Exports from before the vocabulary was kept are checked for its size alone.
    check_fits(replace(lbs, origin=replace(LLADA_TINY, vocabulary=None)), renamed, 128, allow_transfer=True)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LPSConfig(LLADA_TINY, features=("beauty",)), "beauty"),
        (lambda: LPSConfig(LLADA_TINY, features=()), "at least one"),
        (lambda: LPSConfig(LLADA_TINY, encoder="rnn"), "encoder='rnn'"),
        (lambda: LPSConfig(LLADA_TINY, width=30), "model.width=30"),
        (lambda: LBSConfig(LLADA_TINY, embedding_size=8, layers=0), "model.layers=0"),
        (lambda: LBSConfig(LLADA_TINY, embedding_size=8, inputs="tokens"), "inputs='tokens'"),
    ],
)
def test_bad_configs_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()
