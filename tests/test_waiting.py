"""How often a step makes the host wait for a GPU: counted on the CPU, by the calls that would wait."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

from infer.canvas import Request
from infer.filters import DilatedSpacing
from infer.loop import Clock, Decoder
from infer.rules import Method
from infer.when.lps import Lps
from infer.when.stable_prefix import StablePrefix
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.lbs import Lbs
from infer.where.suffix import Suffix
from tests.conftest import BLOCK_LENGTH, GEN_LENGTH
from trace_gen.recorder import Recorder

WAITING = {
    "__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "numpy", "nonzero", "argwhere",
    "masked_select", "unique", "equal", "allclose",
}  # fmt: skip


class Looks(TorchFunctionMode):
    """Counts calls that need a tensor's values on the host: reading one, or an index whose length depends on values."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if name in WAITING or (name in ("__getitem__", "__setitem__") and is_mask(args[1])):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def is_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class Steps:
    """An observer that notes what was counted from one decision to the next: a whole turn of the loop."""

    def __init__(self, looks):
        self.looks, self.marks = looks, []

    def step(self, canvas, seen, chosen_BL):
        self.marks.append(self.looks.found.copy())

    def finished(self, completion):
        pass

    def turns(self) -> list[Counter]:
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


def test_what_is_counted():
    looks, x = Looks(), torch.arange(4)
    with looks:
        bool(x[0]), int(x[1]), x.tolist(), x[x > 2], x.nonzero()
        x[x > 1] = 0
        if x.any():
            pass
        x[1:], x[torch.tensor([0])], torch.where(x > 0, x, 1)
    assert looks.found == Counter(__bool__=2, __int__=1, tolist=1, __getitem__=1, __setitem__=1, nonzero=1)


# Steps that neither end a row nor take one in. A router looks once more on the CPU alone, where attention without a
# mask is faster; with a cache a step in which one row refills and another does not runs two forwards.
@pytest.mark.parametrize(
    ("name", "cache", "least", "most"),
    [
        ("sequential", "none", 6, 6),
        ("threshold", "none", 6, 6),
        ("lsp", "none", 6, 6),
        ("lps", "none", 8, 8),
        ("eb_decode", "none", 8, 11),
        ("threshold", "prefix", 9, 17),
        ("threshold", "dual", 9, 17),
    ],
)
def test_looks_of_a_step(backbone, lbs, lps, monkeypatch, name, cache, least, most):
    monkeypatch.setattr("infer.canvas.holds", lambda condition: True)  # as it is on a GPU
    fixed, learned = Fixed(BLOCK_LENGTH), Lbs(lbs, l_min=2, fallback=BLOCK_LENGTH)
    pairs = {
        "sequential": (fixed, TopK()),
        "threshold": (fixed, Threshold(0.3)),
        "lps": (fixed, Lps(lps, tau=0.6)),
        "eb_decode": (learned, Lps(lps, tau=0.6)),
        "lsp": (Suffix(), StablePrefix()),
    }
    method = Method(name, *pairs[name], stop="full_length", cache=cache)
    looks = Looks()
    steps = Steps(looks)
    decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=2, observers=[steps])
    requests = [Request("a", (40, 41, 42)), Request("b", (43, 44))]
    with looks:
        decoder.warm_up(requests, forwards=1)
        steps.marks.clear()
        done = list(decoder.run(requests))
    turns = steps.turns()[: min(c.nfe for c in done) - 1]
    counts = [sum(turn.values()) for turn in turns]
    assert counts and least <= min(counts) and max(counts) <= most, turns


def test_recording_a_replay_looks_at_nothing(backbone):
    """A recorded step looks no oftener than another; what was recorded is read when the next step comes."""
    found = {}
    for watching in (False, True):
        looks = Looks()
        steps, method = Steps(looks), Method("m", Fixed(BLOCK_LENGTH), Threshold(0.3), stop="full_length")
        observers = [steps, Recorder()] if watching else [steps]
        settings = {"gen_length": GEN_LENGTH, "observers": observers, "extra_needs": Recorder.needs}
        with looks:
            list(Decoder(backbone, method, **settings).run([Request("a", (40, 41))]))
        found[watching] = steps.turns()
    assert len(found[True]) > 3 and found[True] == found[False]


def test_a_clock_waits_only_where_it_is_told_to(backbone, monkeypatch):
    waited = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    gpu = torch.device("cuda")
    for clock in (Clock(), Clock(waits=True)):
        with clock.stage("observe", gpu), clock.stage("when", torch.device("cpu")):
            pass
        assert clock.seconds["observe"] > 0
    assert waited == [gpu]
    method = Method("m", Fixed(BLOCK_LENGTH), Threshold(0.3), filters=[DilatedSpacing()])
    for timed in (False, True):
        decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, timed=timed)
        decoder.warm_up([Request("a", (40,))], forwards=1)
        assert decoder.clock.waits == timed
