"""What is in the repository works right after install: the embedded backbone and its routers belong together."""

from pathlib import Path

import pytest

from backbones.denoiser import load_llada
from infer.canvas import Request
from infer.loop import Decoder
from infer.rules import Method
from infer.when.lps import Lps
from infer.where.lbs import Lbs
from routers.lbs import LBS
from routers.lps import LPS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny():
    return load_llada("backbones/llada_tiny", name="llada_tiny", device="cpu")


def test_the_backbone_is_what_its_card_says(tiny):
    assert (tiny.vocab_size, len(tiny.tokenizer)) == (2048, 2048)
    assert sum(p.numel() for p in tiny.model.parameters()) == 1_328_256
    assert (ROOT / "backbones/llada_tiny/model.safetensors").stat().st_size < 30e6


def test_the_default_routers_fit_it_from_any_directory(tiny, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method = Method("eb_decode", Lbs("routers/llada_tiny/lbs"), Lps("routers/llada_tiny/lps"))
    problem = next(task.problems("test"))
    decoder = Decoder(tiny, method, gen_length=128)
    (completion,) = decoder.run([Request(problem.id, tiny.encode(problem.prompt))])
    assert 1 <= completion.nfe <= 128


def test_the_default_routers_carry_their_record():
    for kind, cls in (("lbs", LBS), ("lps", LPS)):
        router = cls.from_pretrained(ROOT / "routers/llada_tiny" / kind)
        assert router.config.metrics["test/recall"] > 0
        assert router.config.training["traces"]["kind"] == {"lbs": "masked", "lps": "replay"}[kind]
    # LPS was traced in the blocks of the very LBS beside it.
    from routers.checkpoint import router_hash

    traced = router.config.training["traces"]["method"]["block"]["router"]
    assert traced == router_hash(ROOT / "routers/llada_tiny/lbs")
