"""Our loaders and our loop against numbers of the published modelling code.

`fixtures/parity_llada.json` and `fixtures/parity_dream.json` hold configs and seeds of small models, rows of ids, and
what the published code computed from them:

    llada   github.com/NVlabs/Fast-dLLM at 24cc59e75f20a6384bae8c905965bb090b96388e: llada/model/modeling_llada.py and
            the sampler `generate` of llada/generate.py
    dream   github.com/streamer-os/ml-diffucoder at f506c8e3c2adfa4efc425b673f03108f2a9bc55e: model/modeling_dream.py
            and the sampler `diffusion_generate` of model/generation_utils.py

Both ran unmodified under transformers 4.46.2 and torch 2.13.0 on a CPU. `tests/published.py` drew the weights and saved
the shards, the published `from_pretrained` loaded them in float32, and every row was computed alone. Dream's logits are
those after its sampler's shift. For each row the fixture has the argmax and the logsumexp at some positions, and the
logits of some ids there; for each way of generating, the published arguments and the tokens of three prompts. The
prompts are those whose tokens stay the same when noise of 3e-4 is added to all logits, so that another processor's
rounding does not fail a test.

What differs from the published samplers, and is therefore not compared:
- they may predict [MASK] and ids that no token has, and these take their share of every confidence; ours forbids them.
  In these models the logits of such ids are far below all others.
- Dream's sampler takes `top_k` = 50 from transformers' defaults unless told None: its confidences are then shares among
  the 50 most probable ids. Here it was told None.
- Dream's schedule with its default `eps` commits nothing in the first step and two tokens in the last; with a small
  negative one it is a token a step, which `alg=confidence_threshold` with as many steps as tokens is by itself.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backbones.denoiser import TransformersBackbone, load_dream, load_llada
from infer.canvas import Request
from infer.loop import Decoder
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.full import Full
from tests.published import draw_weights, save_sharded, save_words

FIXTURES = Path(__file__).parent / "fixtures"
LOADERS = {"llada": load_llada, "dream": load_dream}
# Our method for each way of generating in the fixtures.
METHODS = {
    "llada": {
        "threshold": (Fixed(16), Threshold(0.3)),
        "one token a step": (Fixed(8), TopK()),
        "steps": (Fixed(16), TopK(steps=6)),
    },
    "dream": {
        "threshold": (Full(), Threshold(0.3)),
        "one token a step": (Full(), TopK()),
        "entropy": (Full(), TopK(ranking="entropy")),
    },
}
ATOL = 5e-5  # of logits up to about 15: five times what two orders of adding up in float32 make here


def records(family: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"parity_{family}.json").read_text())


CASES = [(family, name) for family in LOADERS for name in records(family)]


def rebuild(folder: Path, family: str, record: dict[str, Any], **changes) -> TransformersBackbone:
    """The record's model as our loader reads it; `changes` are made to its config after the weights are drawn."""
    config = record["config"]
    weights = draw_weights(config, record["seed"])
    save_sharded(folder, weights, {**config, **changes}, getattr(torch, record["dtype"]), record["shards"])
    save_words(folder, config)
    return LOADERS[family](str(folder), name=family)


def scored(backbone: TransformersBackbone, rows: list[list[int]]) -> tuple[Tensor, ...]:
    """Logits (length, V) of each row at all its positions, computed as one ragged batch."""
    length = max(map(len, rows))
    pad_B = torch.tensor([length - len(row) for row in rows])
    tokens_BT = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    asked_BT = torch.arange(length) >= pad_B[:, None]
    return backbone.logits(tokens_BT, pad_B, asked_BT).split([len(row) for row in rows])


def distance(backbone: TransformersBackbone, record: dict[str, Any]) -> float:
    """Largest difference of a logit or a logsumexp from the published ones; infinite where an argmax differs.

    Each row is looked at twice, in a ragged batch and alone: attention has a mask only where there is padding.
    """
    rows = record["rows"]
    ragged = scored(backbone, [row["ids"] for row in rows])
    alone = [scored(backbone, [row["ids"]])[0] for row in rows]
    found = 0.0
    for row, logits in zip([*rows, *rows], [*ragged, *alone], strict=True):
        at_KV = logits[row["positions"]]
        if at_KV.argmax(dim=-1).tolist() != row["argmax"]:
            return torch.inf
        for ours, published in (
            (at_KV[:, record["sampled_ids"]], row["logits"]),
            (at_KV.logsumexp(dim=-1), row["logsumexp"]),
        ):
            found = max(found, (ours - torch.tensor(published)).abs().max().item())
    return found


def generated(backbone: TransformersBackbone, family: str, published: dict[str, Any]) -> list[list[int]]:
    """Tokens of our method for the prompts of `published`, decoded as one ragged batch."""
    block, commit = METHODS[family][published["method"]]
    method = Method(published["method"], block, commit, stop="full_length")
    requests = [Request(str(i), tuple(prompt)) for i, prompt in enumerate(published["prompts"])]
    decoder = Decoder(backbone, method, gen_length=len(published["tokens"][0]), batch_size=len(requests))
    ours = {c.id: c.tokens.tolist() for c in decoder.run(requests)}
    return [ours[r.id] for r in requests]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_are_the_published_ones(tmp_path, family, name):
    record = records(family)[name]
    assert max(len(row["ids"]) for row in record["rows"]) >= 200
    assert distance(rebuild(tmp_path, family, record), record) < ATOL


@pytest.mark.parametrize("family", LOADERS)
def test_generated_tokens_are_the_published_ones(tmp_path, family):
    record = records(family)["plain"]
    backbone = rebuild(tmp_path, family, record)
    assert {published["method"] for published in record["generated"]} == set(METHODS[family])
    for published in record["generated"]:
        assert generated(backbone, family, published) == published["tokens"], published["method"]


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("llada", "plain", {"rope_theta": 490000.0}),
        ("llada", "plain", {"rms_norm_eps": 1e-6}),
        ("dream", "plain", {"rope_theta": 990000.0}),
        ("dream", "plain", {"rms_norm_eps": 1e-5}),
    ],
)
def test_another_config_is_noticed(tmp_path, family, name, changes):
    record = records(family)[name]
    assert distance(rebuild(tmp_path, family, record, **changes), record) > 5 * ATOL


def test_a_missing_shift_is_noticed(tmp_path):
    record = records("dream")["plain"]
    backbone = rebuild(tmp_path, "dream", record)
    backbone.shifted = False
    assert distance(backbone, record) == torch.inf
    assert all(generated(backbone, "dream", published) != published["tokens"] for published in record["generated"])
