"""What another precision changes: counted right on a case made by hand, nothing between equals, little in bfloat16."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbones.denoiser import load_llada
from eval.metrics import wilson
from eval.precision import SecondLook, Share, measure
from infer.canvas import Canvas, Request
from infer.observation import Observation
from infer.rules import Method
from infer.when.klass import Klass
from infer.when.threshold import Threshold
from infer.where.fixed import Fixed
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH

ROOT = Path(__file__).resolve().parents[1]


def test_shares():
    share = Share()
    share.add(torch.tensor([True, False, False, True]))
    share.add(torch.tensor(False))
    assert (share.changed, share.n) == (2, 5)
    row = share.row("x")
    assert row["share"] == 0.4 and (row["low"], row["high"]) == wilson(2, 5)


def test_a_second_look_counts_what_differs(backbone):
    """Two rows of three positions; the other backbone says other tokens or is less sure at chosen ones."""
    canvas = Canvas.of([Request("a", (40, 41)), Request("b", (42,))], 3, backbone.mask_id, backbone.eos_id, "cpu")
    canvas.open_blocks(torch.tensor([True, True]), torch.ones(2, 3).bool())
    asked = torch.tensor([[True, True, True], [True, True, False]])
    canvas.masked_BL = asked.clone()
    seen = Observation(
        asked, torch.tensor([[50, 51, 52], [53, 54, 0]]), 60, torch.tensor([[0.95, 0.5, 0.4], [0.95, 0.2, 0]])
    )
    # Row a: position 0 keeps its token, no longer sure, and is still the best. Row b: position 1 has another token,
    # now sure: it is committed as well.
    tokens, sure = [50, 51, 52, 53, 55], [0.85, 0.5, 0.4, 0.95, 0.92]

    class Other:
        forbidden_ids = torch.tensor([0])

        def logits(self, tokens_BT, pad_B, asked_BT):
            assert asked_BT.tolist() == [[False] * 2 + row for row in asked.tolist()]
            found = torch.full((5, 60), -10.0)
            for row, (token, p) in enumerate(zip(tokens, sure, strict=True)):
                found[row, 1:] = torch.tensor((1 - p) / 58).log()
                found[row, token] = torch.tensor(p).log()
            return found

    method = Method("m", Fixed(3), Threshold(0.9))
    look = SecondLook(Other(), method, 0.9)
    look.step(canvas, seen, method.decide(canvas, seen))
    found = [(s.changed, s.n) for s in (look.top1, look.member, look.step_taken)]
    assert found == [(1, 5), (2, 5), (1, 2)]
    with pytest.raises(ValueError, match="method=k: its rule compares steps.*use another"):
        SecondLook(Other(), Method("k", Fixed(3), Klass()), 0.9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precisions_of_the_random_backbone(backbone, backbone_folder, dtype):
    other = load_llada(str(backbone_folder), name="other", dtype=dtype, device="cpu")
    requests = [Request(str(i), tuple(range(20, 20 + n))) for i, n in enumerate((3, 17, 8, 1))]
    shares, pairs = measure(
        backbone,
        other,
        lambda: Method("m", Fixed(BLOCK_LENGTH), Threshold(0.3)),
        requests,
        gen_length=GEN_LENGTH,
        batch_size=3,
        tau=0.3,
    )
    top1, member, step, output = shares.values()
    assert set(pairs) == {"0", "1", "2", "3"} and output.n == 4 and step.n == sum(a.nfe for a, _ in pairs.values())
    assert top1.n == member.n > step.n
    if dtype == "float32":
        assert top1.changed == member.changed == step.changed == output.changed == 0
    else:
        # Random weights have many near ties, so some predictions move; by far most do not.
        assert 0 < top1.changed / top1.n < 0.2 and member.changed / member.n < 0.2
        assert step.changed >= 1


def test_from_the_command_line(tmp_path, backbone_folder):
    def run(*overrides):
        command = [
            sys.executable, str(ROOT / "eval/precision.py"), f"backbone.path={backbone_folder}", "backbone.device=cpu",
            f"decode.gen_length={GEN_LENGTH}", "limit=2", "out=p", *overrides,
        ]  # fmt: skip
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "p/precision.json").read_text())
    assert [r["n"] for r in rows][-2:] == [2, 2] and all(r["low"] <= r["share"] <= r["high"] for r in rows)
    assert "confidence >= 0.9" in done.stdout and "right answers" in done.stdout
    assert "other=float32 is backbone.dtype as well" in run("other=float32").stderr
