"""Divergences between steps against dictionaries of plain probabilities, and KLASS decoding from its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infer.observation
from infer.canvas import Request
from infer.drift import Drift
from infer.loop import Decoder
from infer.rules import Method
from infer.when.klass import Klass
from infer.where.fixed import Fixed
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH

LENGTH, VOCABULARY, FORBIDDEN = 3, 5, (1, 4)


def probabilities(logits, forbidden):
    weights = [0.0 if v in forbidden else math.exp(z) for v, z in enumerate(logits)]
    return [w / sum(weights) for w in weights]


def divergence(now, before):
    return sum(p * math.log(p / q) for p, q in zip(now, before, strict=True) if p > 0)


@st.composite
def decodes(draw):
    """Steps of (asked flags, logits, rows kept after it); a batch that rows leave, and others join at its end."""
    rows, steps = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 6))):
        asked = [draw(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)) for _ in range(rows)]
        asked[0][0] = True
        logit = st.sampled_from([-40.0, -1.0, 0.0, 0.001, 3.0])
        logits = [[draw(st.lists(logit, min_size=VOCABULARY, max_size=VOCABULARY)) for _ in row] for row in asked]
        kept = draw(st.lists(st.sampled_from(range(rows)), unique=True).map(sorted))
        steps.append((asked, logits, kept))
        rows = max(1, len(kept) + draw(st.integers(0, 2)))
    return steps


@settings(max_examples=60, deadline=None)
@given(decode=decodes(), history=st.integers(1, 3))
def test_drift(decode, history):
    drift = Drift(history, torch.tensor(FORBIDDEN))
    before, past = {}, {}  # of (row, position): the last probabilities, and all divergences
    for asked, logits, kept in decode:
        flat = torch.tensor(logits)[torch.tensor(asked)]
        found = drift.update(flat, torch.tensor(asked))
        assert found.shape == (len(asked), LENGTH, history)
        for where in ((row, j) for row in range(len(asked)) for j in range(LENGTH)):
            row, j = where
            if asked[row][j]:
                now = probabilities(logits[row][j], FORBIDDEN)
                kl = divergence(now, before[where]) if where in before else math.inf
                past.setdefault(where, []).append(kl)
                before[where] = now
            wanted = ([math.inf] * history + past.get(where, []))[-history:]
            assert found[row, j].tolist() == pytest.approx(wanted, abs=1e-5)
        drift.keep(kept)
        before = {(i, j): before[row, j] for i, row in enumerate(kept) for j in range(LENGTH) if (row, j) in before}
        past = {(i, j): past[row, j] for i, row in enumerate(kept) for j in range(LENGTH) if (row, j) in past}


def test_chunks_change_nothing(monkeypatch):
    steps = torch.randn(3, 14, 11).unbind()
    asked = torch.ones(2, 7, dtype=torch.bool)
    whole, parts = Drift(2, torch.tensor([0])), Drift(2, torch.tensor([0]))
    found = [whole.update(logits, asked) for logits in steps]
    monkeypatch.setattr(infer.observation, "CPU_CHUNK_ELEMENTS", 50)
    assert all(torch.equal(kl, parts.update(logits, asked)) for kl, logits in zip(found, steps, strict=True))
    assert (found[0] == torch.inf).all() and found[2].isfinite().all()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_klass_decodes_as_its_definition_says(backbone, steps):
    """One row as a loop over float64 probabilities of every generation position; blocks with steady members count."""
    tau, epsilon, prompt, at_once = 0.3, 2.0, (40, 41, 42), 0
    method = Method("klass", Fixed(BLOCK_LENGTH), Klass(tau, epsilon, steps), stop="full_length")
    (completion,) = Decoder(backbone, method, gen_length=GEN_LENGTH).run([Request("a", prompt)])
    forbidden = set(backbone.forbidden_ids.tolist())
    tokens = [backbone.mask_id] * GEN_LENGTH
    committed_at, past, before, step = [None] * GEN_LENGTH, [[] for _ in tokens], None, 0
    while backbone.mask_id in tokens:
        canvas = torch.tensor([[*prompt, *tokens]])
        logits = backbone.logits(canvas, torch.zeros(1, dtype=torch.long), torch.ones_like(canvas, dtype=torch.bool))
        now = [probabilities(row, forbidden) for row in logits[len(prompt) :].tolist()]
        for j in range(GEN_LENGTH):
            past[j].append(divergence(now[j], before[j]) if before else math.inf)
        start = tokens.index(backbone.mask_id) // BLOCK_LENGTH * BLOCK_LENGTH
        block = [j for j in range(start, min(start + BLOCK_LENGTH, GEN_LENGTH)) if tokens[j] == backbone.mask_id]
        ready = [j for j in block if max(now[j]) >= tau and len(past[j]) >= steps and max(past[j][-steps:]) < epsilon]
        at_once += len(ready) > 1
        for j in ready or [max(block, key=lambda j: max(now[j]))]:
            tokens[j], committed_at[j] = now[j].index(max(now[j])), step
        before, step = now, step + 1
    assert completion.tokens.tolist() == tokens and completion.committed_at.tolist() == committed_at
    assert at_once > 2, "steps that commit several positions are what the rule is about"
