"""How often a step makes the host wait for a GPU: counted on the CPU, by the calls that would wait."""

from collections import Counter

import pytest
import torch

from infer.canvas import Request
from infer.filters import DilatedSpacing
from infer.loop import Clock, Decoder
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.where.fixed import Fixed
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH, METHODS, decode, same
from tests.looks import Looks
from trace_gen.recorder import Recorder


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


CACHES = ("none", "prefix", "dual")


def most_looks(method) -> int:
    """The loop looks once a step. On the CPU alone each router looks, as attention without a mask is faster there;
    `DilatedSpacing` looks after each pass over what was chosen."""
    spacing = any(isinstance(rule, DilatedSpacing) for rule in method.filters)
    return 1 + method.block.has_router + method.commit.has_router + 8 * spacing


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cache", CACHES)
def test_looks_of_a_step(backbone, make_method, requests, as_on_a_gpu, name, cache):
    """In steps that neither end a row nor take one in."""
    method = make_method(name, "full_length", cache=cache)
    looks = Looks()
    steps = Steps(looks)
    decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=2, observers=[steps])
    with looks:
        decoder.warm_up(requests[:2], forwards=1)
        steps.marks.clear()
        done = list(decoder.run(requests[:2]))
    turns = steps.turns()[: min(c.nfe for c in done) - 1]
    counts = [sum(turn.values()) for turn in turns]
    assert counts and min(counts) >= 1 and max(counts) <= most_looks(method), turns


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_gpu_decides_as_a_cpu(backbone, make_method, requests, monkeypatch, name, cache):
    """What the host knows before a step stands for what it would have read in it, rows joining and leaving included."""
    settings = {"batch_size": 4}
    read, _ = decode(backbone, make_method(name, cache=cache), requests, **settings)
    monkeypatch.setattr("backbones.host.at_hand", lambda tensor: False)
    known, _ = decode(backbone, make_method(name, cache=cache), requests, **settings)
    assert read.keys() == known.keys() and all(same(read[i], known[i]) for i in read)


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
