"""Statistics against float64 formulas written out one position at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import infer.observation
from infer.observation import STATISTICS, observe, statistics

ALL = frozenset(STATISTICS)
NONE = torch.tensor([], dtype=torch.long)  # no id is forbidden


def plain(logits):
    """top-1, confidence, second, entropy and margin of one position, in Python floats."""
    best = max(logits)
    weights = [math.exp(z - best) if z > -math.inf else 0.0 for z in logits]
    total = sum(weights)
    p = [w / total for w in weights]
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    entropy = -sum(q * math.log(q) for q in p if q > 0)
    return order[0], p[order[0]], p[order[1]], entropy, logits[order[0]] - logits[order[1]]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-60, 60, width=32), min_size=6, max_size=6), min_size=1, max_size=5),
    forbidden=st.sets(st.integers(0, 5), max_size=3),
)
def test_statistics_are_the_formulas(rows, forbidden):
    logits = torch.tensor(rows, dtype=torch.float32)
    seen = observe(
        logits, torch.ones(1, len(rows), dtype=torch.bool), ALL, torch.tensor(sorted(forbidden), dtype=torch.long)
    )
    for i, row in enumerate(logits.tolist()):
        allowed = [-math.inf if j in forbidden else z for j, z in enumerate(row)]
        top1, confidence, second, entropy, margin = plain(allowed)
        assert allowed[seen.top1_BL[0, i]] == allowed[top1] and int(seen.top1_BL[0, i]) not in forbidden
        assert seen.confidence_BL[0, i].item() == pytest.approx(confidence, abs=1e-6)
        assert seen.second_BL[0, i].item() == pytest.approx(second, abs=1e-6)
        assert seen.entropy_BL[0, i].item() == pytest.approx(entropy, abs=1e-5)
        assert seen.margin_BL[0, i].item() == pytest.approx(margin, abs=1e-4)


def test_nothing_else_is_computed():
    logits = torch.randn(3, 7)
    assert set(statistics(logits, frozenset({"confidence"}), NONE)) == {"top1", "confidence"}
    seen = observe(logits, torch.ones(1, 3, dtype=torch.bool), frozenset({"confidence"}), torch.tensor([0]))
    assert seen.entropy_BL is None and seen.margin_BL is None and seen.second_BL is None


def test_half_precision_logits_give_float32_statistics():
    logits = torch.randn(4, 50).bfloat16()
    seen = observe(logits, torch.ones(1, 4, dtype=torch.bool), ALL, torch.tensor([0]))
    exact = observe(logits.float(), torch.ones(1, 4, dtype=torch.bool), ALL, torch.tensor([0]))
    assert seen.entropy_BL.dtype == torch.float32 and torch.equal(seen.entropy_BL, exact.entropy_BL)


def test_what_else_is_asked_does_not_change_the_token():
    """Equal logits, as half precision gives them: a trace must see the token that inference commits."""
    logits = torch.randint(0, 3, (200, 40)).bfloat16()
    tokens = [
        statistics(logits, frozenset(needs), NONE)["top1"]
        for needs in (("confidence",), ALL, ("entropy",), ("margin",))
    ]
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])


def test_unasked_positions_are_zero_and_rows_keep_their_place():
    asked = torch.tensor([[True, False, True], [False, True, False]])
    logits = torch.zeros(3, 5)
    logits[torch.arange(3), torch.tensor([1, 2, 3])] = 9.0
    seen = observe(logits, asked, frozenset({"confidence"}), torch.tensor([0]))
    assert seen.top1_BL.tolist() == [[1, 0, 2], [0, 3, 0]]
    assert (seen.confidence_BL[~asked] == 0).all()


def test_chunks_change_nothing(monkeypatch):
    logits, uniform = torch.randn(37, 11), torch.rand(37)
    whole = statistics(logits, ALL, NONE, 0.7, uniform)
    monkeypatch.setattr(infer.observation, "CPU_CHUNK_ELEMENTS", 50)
    parts = statistics(logits, ALL, NONE, 0.7, uniform)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


class Largest(TorchDispatchMode):
    """The most elements of anything made that is no view of `given`."""

    def __init__(self, given):
        super().__init__()
        self.given, self.found = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.given:
                self.found = max(self.found, tensor.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_are_neither_copied_nor_changed(monkeypatch, dtype):
    """At a real model's size a copy of them is gigabytes."""
    monkeypatch.setattr(infer.observation, "CPU_CHUNK_ELEMENTS", 50)
    logits, forbidden = torch.randn(37, 11, dtype=dtype), torch.tensor([2, 9])
    before = logits.clone()
    with Largest(logits) as largest:
        observe(logits, torch.ones(1, 37, dtype=torch.bool), ALL, forbidden)
    assert torch.equal(logits, before) and 37 <= largest.found <= 50


def test_sampling_follows_the_tempered_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).expand(40_000, 4)
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    found = statistics(logits, frozenset({"confidence"}), NONE, 0.5, uniform)
    shares = torch.bincount(found["top1"], minlength=4) / 40_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(0), atol=0.01, rtol=0)
    # Confidence is the sampled token's probability without the temperature.
    torch.testing.assert_close(found["confidence"], logits[0].softmax(0)[found["top1"]])


def test_one_allowed_token_is_certain():
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 3.0
    found = statistics(logits, frozenset({"confidence", "entropy"}), NONE)
    assert found["confidence"].item() == 1 and found["entropy"].item() == 0
