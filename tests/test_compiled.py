"""A compiled backbone says what the plain one says; where nothing can be compiled it says so."""

import shutil

import pytest
import torch

from backbones.compiled import BUCKET
from backbones.denoiser import load_llada
from infer.canvas import Request
from infer.loop import Decoder
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH

REQUESTS = [Request(str(i), tuple(range(20, 20 + n))) for i, n in enumerate((3, 17, 8, 30, BUCKET))]


def decode(backbone):
    method = Method("m", Fixed(BLOCK_LENGTH), Threshold(0.3))
    decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=3)
    return {c.id: (c.tokens.tolist(), c.committed_at.tolist(), c.nfe) for c in decoder.run(REQUESTS)}


def load(backbone_folder):
    return load_llada(str(backbone_folder), name="compiled", device="cpu", compile=True)


def test_lengths_come_in_few_sizes_and_change_nothing(backbone, backbone_folder, monkeypatch):
    """Without a compiler: what is handed to the compiled function, and what becomes of its result."""
    shapes = set()

    def watched(function):
        def run(tokens_BT, pad_B):
            shapes.add(tuple(tokens_BT.shape))
            return function(tokens_BT, pad_B)

        return run

    monkeypatch.setattr("torch.compile", watched)
    monkeypatch.setattr("backbones.compiled.check_compiler", lambda device: None)
    assert decode(load(backbone_folder)) == decode(backbone)
    assert {length for _, length in shapes} == {BUCKET, 2 * BUCKET} and len({rows for rows, _ in shapes}) > 1


def test_caches_are_refused_by_name(backbone_folder, monkeypatch):
    monkeypatch.setattr("backbones.compiled.check_compiler", lambda device: None)
    method = Method("m", Fixed(BLOCK_LENGTH), Threshold(0.3), cache="prefix")
    with pytest.raises(ValueError, match="cache=prefix: compiled has no cache .backbone.compile=true.*use cache=none"):
        Decoder(load(backbone_folder), method, gen_length=GEN_LENGTH)


def test_a_missing_compiler_is_named(backbone_folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match="backbone.compile=true needs a C.. compiler .g.., clang.., cl. for the CPU"):
        load(backbone_folder)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler for torch.compile here")
def test_a_compiled_backbone_decodes_the_same(backbone, backbone_folder):
    """One graph serves batches of two and three rows, of unequal prompts and lengths up to the same multiple."""
    compiled = load(backbone_folder)
    method = Method("m", Fixed(BLOCK_LENGTH), TopK(), stop="full_length")

    def decode(backbone):
        decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=2)
        return {c.id: (c.tokens.tolist(), c.committed_at.tolist()) for c in decoder.run(REQUESTS[:2])}

    torch._dynamo.utils.counters.clear()
    assert decode(compiled) == decode(backbone)
    tokens, pad = torch.randint(10, 300, (3, 50)), torch.tensor([0, 4, 20])
    asked = torch.arange(50) >= pad[:, None]
    torch.testing.assert_close(
        compiled.logits(tokens, pad, asked), backbone.logits(tokens, pad, asked), atol=1e-4, rtol=1e-4
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
