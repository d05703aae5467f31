"""A checkpoint with modelling code of its own: nothing runs unasked, batches are exact, contradictions are named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backbones.base import Sizes
from backbones.hf_remote import load_remote
from infer.canvas import Request
from infer.loop import Decoder
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.where.fixed import Fixed
from tests.looks import Looks

ROOT = Path(__file__).resolve().parents[1]
GEN_LENGTH = 20

# A denoiser as somebody might publish it: absolute positions, no mask and no position ids, so that padding would
# change what it says.
CODE = """
import os
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

os.environ["REMOTE_CODE_RAN"] = "yes"


class OwnConfig(PretrainedConfig):
    model_type = "own_denoiser"

    def __init__(self, vocab_size=8, width=16, max_position_embeddings=96, causal=False, **rest):
        self.vocab_size, self.width, self.causal = vocab_size, width, causal
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**rest)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.place = nn.Embedding(config.max_position_embeddings, config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.post_init()

    def get_input_embeddings(self):
        return self.token

    def forward(self, input_ids):
        x = self.token(input_ids) + self.place.weight[: input_ids.shape[1]]
        scores = x @ self.mix(x).transpose(1, 2)
        if self.config.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return BaseModelOutput(last_hidden_state=x + scores.softmax(-1) @ x)


class OwnModelForMaskedLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.own = OwnModel(config)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.own.token

    def forward(self, input_ids):
        return MaskedLMOutput(logits=self.head(self.own(input_ids).last_hidden_state))
"""


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path_factory, monkeypatch):
    """transformers copies a checkpoint's code before it imports it: not into the user's cache here."""
    folder = tmp_path_factory.mktemp("modules")
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.delenv("REMOTE_CODE_RAN", raising=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer):
    namespace = {}
    exec(CODE, namespace)
    os.environ.pop("REMOTE_CODE_RAN")
    torch.manual_seed(3)
    model = namespace["OwnModelForMaskedLM"](namespace["OwnConfig"](vocab_size=len(tokenizer) + 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    folder = tmp_path_factory.mktemp("remote") / "own"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(CODE)
    classes = {"AutoConfig": "OwnConfig", "AutoModel": "OwnModel", "AutoModelForMaskedLM": "OwnModelForMaskedLM"}
    change(folder, auto_map={k: f"modeling_own.{v}" for k, v in classes.items()}, eos_token_id=tokenizer.eos_token_id)
    return folder


def change(folder, **fields):
    """Sets fields of config.json; None removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def load(folder, **settings):
    settings = {"trust_remote_code": True, "model_class": "AutoModelForMaskedLM", **settings}
    return load_remote(str(folder), name="own", **settings)


@pytest.fixture
def remote(folder):
    with pytest.warns(UserWarning, match="modeling_own.py of .* runs now"):
        return load(folder)


def test_nothing_runs_unasked(folder):
    for settings in ({}, {"trust_remote_code": False}, {"trust_remote_code": "yes"}):
        with pytest.raises(ValueError, match="would run here with your rights.*opt in with backbone.trust_remote_code"):
            load_remote(str(folder), name="own", model_class="AutoModelForMaskedLM", **settings)
    for settings, named in (
        ({"dtype": "int8"}, "backbone.dtype='int8'"),
        ({"model_class": "AutoModelForVision"}, "model_class='AutoModelForVision'.*AutoModelForCausalLM"),
        ({"model_class": "AutoModelForCausalLM"}, "no code for it.*AutoModelForMaskedLM"),
        ({"max_length": 97}, "max_length=97: need 2 to 96"),
    ):
        with pytest.raises(ValueError, match=named):
            load(folder, **settings)
    assert "REMOTE_CODE_RAN" not in os.environ


def test_it_is_a_backbone(remote, tokenizer):
    assert os.environ["REMOTE_CODE_RAN"] == "yes"
    assert remote.mask_id == tokenizer.mask_token_id and remote.eos_id == tokenizer.eos_token_id
    assert remote.vocab_size == len(tokenizer) + 3 and remote.max_length == 96
    assert remote.embedding.shape == (remote.vocab_size, 16)
    assert set(range(len(tokenizer), len(tokenizer) + 3)) <= set(remote.forbidden_ids.tolist())
    assert tokenizer.decode(remote.encode("How many?")[-1:]) == "<|assistant|>"
    assert not any(p.requires_grad for p in remote.model.parameters())


ROWS = [[5, 9, 40, 41, 17], [33, 34, 35, 36, 37, 38, 39, 40], [7], [8, 9, 10, 11, 12]]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.filterwarnings("ignore:backbone.trust_remote_code")
def test_ragged_batches_are_exact(folder, shifted):
    """Every row of a batch gets what the published model says of that row alone."""
    backbone = load(folder, shifted=shifted)
    longest = max(map(len, ROWS)) + 2
    pad = torch.tensor([longest - len(row) for row in ROWS])
    tokens = torch.tensor([[1] * (longest - len(row)) + row for row in ROWS])
    asked = torch.arange(longest) >= pad[:, None]
    alone = [backbone.model(torch.tensor([row])).logits[0] for row in ROWS]
    if shifted:  # what comes before a row's first position is nothing of it
        alone = [torch.cat([logits[:1], logits[:-1]]) for logits in alone]
    expected = torch.cat(alone)
    torch.testing.assert_close(backbone.logits(tokens, pad, asked), expected)
    # Guards the line above: padding does change what this model says.
    padded = backbone.model(tokens).logits[asked]
    assert (padded - expected).abs().max() > 0.1
    same = torch.tensor([ROWS[0], ROWS[3]])
    some = torch.tensor([[False, True, False, True, False], [False, False, False, False, True]])
    row_N, column_N = some.nonzero(as_tuple=True)
    plain = backbone.model(same).logits[row_N, column_N - int(shifted)]
    torch.testing.assert_close(backbone.logits(same, torch.zeros(2, dtype=torch.long), some), plain)


def test_sizes_that_are_known_are_not_looked_up(remote, as_on_a_gpu):
    pad_B, tokens_BT = torch.tensor([2, 0, 2]), torch.arange(21).view(3, 7)
    asked_BT = tokens_BT % 4 == 3
    expected, looks = remote.logits(tokens_BT, pad_B, asked_BT), Looks()
    sizes = Sizes.of(pad_B, asked_BT)
    with looks:
        found = remote.logits(tokens_BT, pad_B, asked_BT, sizes)
    assert torch.equal(found, expected) and not looks.found


def test_decoding(remote):
    requests = [Request(str(i), tuple(range(20, 20 + n))) for i, n in enumerate((3, 9, 3, 14))]

    def decode(batch_size, **settings):
        method = Method("m", Fixed(8), Threshold(0.3), stop="full_length", **settings)
        decoder = Decoder(remote, method, gen_length=GEN_LENGTH, batch_size=batch_size)
        return {c.id: (c.tokens.tolist(), c.nfe) for c in decoder.run(requests)}

    assert decode(4) == decode(1)
    with pytest.raises(ValueError, match="cache=dual: own has no cache .its own modelling code.*use cache=none"):
        decode(1, cache="dual")


@pytest.mark.filterwarnings("ignore:backbone.trust_remote_code")
def test_what_decides_the_logits_is_in_the_fingerprint(folder, tmp_path):
    first = load(folder).fingerprint
    assert load(folder).fingerprint == first != load(folder, shifted=True).fingerprint
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "modeling_own.py").write_text(CODE.replace("x + scores", "x - scores"))
    assert load(other).fingerprint != first


@pytest.mark.filterwarnings("ignore:backbone.trust_remote_code")
def test_ids_come_from_the_checkpoint_or_are_given(folder, tmp_path, tokenizer):
    mask, eos = tokenizer.mask_token_id, tokenizer.eos_token_id
    assert load(folder, mask_token_id=mask, max_length=50).max_length == 50
    with pytest.raises(ValueError, match=f"mask_token_id={mask + 1} contradicts.*the tokenizer {mask}"):
        load(folder, mask_token_id=mask + 1)
    with pytest.raises(ValueError, match="mask_token_id=-1: need an id"):
        load(folder, mask_token_id=-1)
    other = shutil.copytree(folder, tmp_path / "other")
    change(other, mask_token_id=77)
    with pytest.raises(ValueError, match=f"config.json 77, the tokenizer {mask} .*settles it; give backbone.mask_tok"):
        load(other)
    assert load(other, mask_token_id=77).mask_id == 77
    change(other, mask_token_id=eos)
    with pytest.raises(ValueError, match=f"mask_token_id={eos} is eos_token_id as well"):
        load(other, mask_token_id=eos)
    tokens = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in tokens.items() if k != "mask_token"}))
    change(other, mask_token_id=None)
    with pytest.raises(ValueError, match="neither config.json nor the tokenizer.*give backbone.mask_token_id"):
        load(other)
    assert load(other, mask_token_id=mask).mask_id == mask
    with pytest.raises(ValueError, match="id 100000 is outside the vocabulary"):
        load(other, mask_token_id=100_000)


@pytest.mark.filterwarnings("ignore:backbone.trust_remote_code")
def test_models_that_do_not_fit_are_named(folder, tmp_path):
    trunk = trunk_only(shutil.copytree(folder, tmp_path / "trunk"))
    with pytest.raises(ValueError, match="model_class=AutoModel: .*no logits.*AutoModelForMaskedLM"):
        load(trunk, model_class="AutoModel")
    with pytest.raises(ValueError, match="tensors are missing.*model_class=AutoModelForMaskedLM the right one"):
        load(trunk)
    other = shutil.copytree(folder, tmp_path / "other")
    change(other, causal=True)
    with pytest.raises(ValueError, match="changes nothing to its left.*causal"):
        load(other)
    change(other, causal=False, max_position_embeddings=None)
    with pytest.raises(ValueError, match="names no length; give backbone.max_length"):
        load(other)
    change(other, max_position_embeddings=96, width=17)
    with pytest.raises(ValueError, match="missing or of another shape"):
        load(other)
    sources = json.loads((folder / "config.json").read_text())["auto_map"]
    change(other, width=16, auto_map={k: f"somebody/else--{v}" for k, v in sources.items()})
    with pytest.raises(ValueError, match="code lies in another repository .*somebody/else"):
        load(other)
    change(other, auto_map=sources, transformers_version="4.46.3")
    (other / "modeling_own.py").write_text(CODE.replace("self.token(input_ids)", "self.tokens(input_ids)"))
    with pytest.raises(ValueError, match="written for transformers 4.46.3, fails under 5.*'tokens'"):
        load(other)
    (other / "modeling_own.py").unlink()
    with pytest.raises(ValueError, match="no \\*.py is there"):
        load(other)


@pytest.mark.filterwarnings("ignore:backbone.trust_remote_code")
def test_a_tied_head_is_stored_once(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    head = "    def get_output_embeddings(self):\n        return self.head\n"
    (other / "modeling_own.py").write_text(CODE + "\n" + head)
    state = load_file(other / "model.safetensors")
    del state["head.weight"]
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    change(other, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tensors are missing.*head.weight"):
        load(other)
    change(other, tie_word_embeddings=True)
    model = load(other).model
    assert model.head.weight is model.own.token.weight


def trunk_only(folder):
    """Leaves the trunk's tensors alone, under the names that the trunk itself gives them."""
    state = load_file(folder / "model.safetensors")
    state = {n.removeprefix("own."): t for n, t in state.items() if n.startswith("own.")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_from_the_command_line(folder, tmp_path):
    command = [
        sys.executable, str(ROOT / "infer/generate.py"), "backbone=hf_remote", f"backbone.path={folder}",
        "backbone.model_class=AutoModelForMaskedLM", "backbone.dtype=float32", "backbone.device=cpu",
        "method=threshold", "prompt=How many?", f"decode.gen_length={GEN_LENGTH}", "decode.block_length=8",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "opt in with backbone.trust_remote_code=true" in done.stderr
    done = subprocess.run([*command, "backbone.trust_remote_code=true"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "NFE" in done.stdout and "runs now, with your rights" in done.stderr
