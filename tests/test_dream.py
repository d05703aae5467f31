"""Dream checkpoints: a random one in the published format, its shift, caches, and the whole pipeline's view of it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from omegaconf import OmegaConf
from transformers import Qwen2ForCausalLM

from backbones.denoiser import load_dream
from backbones.describe import expected_shapes, mapping_faults, memory
from backbones.dream_format import qwen2_config
from backbones.llada_format import llama_config, to_llada_name
from infer.canvas import Request
from infer.loop import Decoder
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.where.fixed import Fixed
from tests.random_dream import dream_config, save_dream

ROOT = Path(__file__).resolve().parents[1]
LLADA = sorted(set((ROOT / "conf" / "backbone").glob("llada_*.yaml")) - {ROOT / "conf/backbone/llada_tiny.yaml"})
GEN_LENGTH = 24


@pytest.fixture(scope="module")
def dream(tmp_path_factory, tokenizer):
    folder, model = save_dream(tmp_path_factory.mktemp("dream") / "d", tokenizer)
    return load_dream(str(folder), name="dream"), model


def test_real_dream_7b_shapes(tokenizer):
    """Dream-7B's published config on the meta device."""
    config = dream_config(
        tokenizer, vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(qwen2_config(config))
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    names = {n for n, _ in model.named_parameters()}
    assert len(names) == 3 + 28 * 12
    assert {f"model.layers.0.self_attn.{p}_proj.bias" for p in "qkv"} <= names
    assert "model.layers.0.self_attn.o_proj.bias" not in names


def test_logits_are_shifted_once(dream):
    """The logits at position i are the head's at position i - 1, for rows with and without padding."""
    backbone, model = dream
    ids = torch.randint(10, 300, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), use_cache=False).logits[
            0
        ]
    asked = torch.zeros(2, 23, dtype=torch.bool)
    asked[0, [4, 9, 22]] = True
    asked[1, [5, 6]] = True
    padded = torch.nn.functional.pad(ids, (3, 0)).repeat(2, 1)
    found = backbone.logits(padded, torch.tensor([3, 3]), asked)
    torch.testing.assert_close(found, plain[[0, 5, 18, 1, 2]], atol=1e-4, rtol=1e-4)


def test_a_first_position_is_predicted_by_itself(dream):
    """Nothing stands before a row's first position; as in the published sampler, its own logits are its prediction."""
    backbone, model = dream
    rows = [[11, 12, 13, 14], [15, 16]]
    tokens, pad = torch.tensor([rows[0], [0, 0, *rows[1]]]), torch.tensor([0, 2])
    real = torch.arange(4) >= pad[:, None]
    with torch.no_grad():
        plain = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    wanted = torch.cat([torch.cat([logits[:1], logits[:-1]]) for logits in plain])
    torch.testing.assert_close(backbone.logits(tokens, pad, real), wanted, atol=1e-4, rtol=1e-4)
    every = torch.ones(2, dtype=torch.bool)
    found = backbone.cached_logits(tokens, pad, real, real, every, backbone.new_cache(2, 4))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    second = torch.tensor([False, True])
    found = backbone.cached_logits(tokens, pad, real, real, second, backbone.new_cache(2, 4))
    torch.testing.assert_close(found, wanted[4:], atol=1e-4, rtol=1e-4)


def test_tokenizer_without_remote_code(dream, tokenizer):
    backbone, _ = dream
    assert backbone.encode("How many?") == tuple(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_dict=False
        )
    )
    assert set(range(len(tokenizer), len(tokenizer) + 7)) <= set(backbone.forbidden_ids.tolist())


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_decoding_in_batches_and_with_caches(dream, cache):
    backbone, _ = dream
    requests = [Request(str(i), tuple(range(20, 20 + n))) for i, n in enumerate((3, 9, 1, 14))]

    def decode(batch_size, **settings):
        method = Method("m", Fixed(8), Threshold(0.3), stop="full_length", **settings)
        decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=batch_size)
        return {c.id: (c.tokens.tolist(), c.nfe) for c in decoder.run(requests)}

    alone = decode(1, cache=cache)
    assert decode(3, cache=cache) == alone
    assert len({nfe for _, nfe in alone.values()}) > 1 or len({tuple(t) for t, _ in alone.values()}) > 1
    assert decode(3, cache=cache, refresh_every=1) == decode(1)


def test_tied_half_precision_checkpoints(tmp_path, tokenizer):
    folder, model = save_dream(tmp_path / "tied", tokenizer, torch.bfloat16, tie_word_embeddings=True)
    backbone = load_dream(str(folder), name="tied", dtype="float32")
    assert backbone.model.lm_head.weight.data_ptr() == backbone.embedding.data_ptr()
    torch.testing.assert_close(backbone.embedding, model.model.embed_tokens.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2'.*Dream"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"mask_token_id": None}, "no mask_token_id"),
        ({"mask_token_id": 10**6}, "mask_token_id=1000000 is outside"),
        ({"eos_token_id": -1}, "eos_token_id=-1 is outside"),
    ],
)
def test_bad_configs_are_named(tmp_path, tokenizer, changes, named):
    folder, _ = save_dream(tmp_path / "bad", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=named):
        load_dream(str(folder), name="bad")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer):
    folder, _ = save_dream(tmp_path / "small", tokenizer, vocab_size=len(tokenizer) - 2)
    with pytest.raises(ValueError, match=f"tokenizer has {len(tokenizer)} ids, the model only {len(tokenizer) - 2}"):
        load_dream(str(folder), name="small")


def test_weights_too_large_for_memory_are_refused_before_reading(tmp_path, tokenizer, monkeypatch):
    folder, _ = save_dream(tmp_path / "large", tokenizer)
    monkeypatch.setattr("backbones.placement.free_memory", lambda device: 64)
    with pytest.raises(ValueError, match="GiB free; try backbone.dtype=bfloat16"):
        load_dream(str(folder), name="large")


def test_an_unreachable_hub_says_how_to_pass_a_folder():
    with pytest.raises(ValueError, match="no such folder; give one"):
        load_dream("no/such/folder/here", name="x")
    with pytest.raises(ValueError, match="hub cannot be reached.*backbone.path=/path/to/it"):
        load_dream("Dream-org/Dream-v0-Instruct-7B", name="x")
    with pytest.raises(ValueError, match="nothing cached under this hub id at backbone.revision=abc, and"):
        load_dream("Dream-org/Dream-v0-Instruct-7B", name="x", revision="abc")


def test_a_revision_that_the_repository_lacks_is_named(monkeypatch):
    def missing(path, revision, **_):
        raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr("backbones.hub.snapshot_download", missing)
    with pytest.raises(ValueError, match="backbone.revision=abc: no commit of me/fine-tuned.*=null takes its newest"):
        load_dream("me/fine-tuned", name="x", revision="abc")


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "backbone").glob("*7b*.yaml")) + LLADA, ids=lambda p: p.stem)
def test_hub_models_are_pinned_to_a_commit(path):
    assert re.fullmatch("[0-9a-f]{40}", OmegaConf.load(path).backbone.revision)


def describe(folder, *overrides):
    command = [sys.executable, str(ROOT / "backbones" / "describe.py"), f"backbone.path={folder}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_describe_reads_a_checkpoint_of_each_format(tmp_path, tokenizer, backbone_folder):
    folder, model = save_dream(tmp_path / "d", tokenizer)
    shown = describe(folder, "backbone=dream_7b_instruct")
    assert shown.returncode == 0, shown.stderr
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in shown.stdout
    assert "all fit" in shown.stdout and "shifted" in shown.stdout and "local_leap_tau 0.8" in shown.stdout
    assert "<|mdm_mask|>" in shown.stdout
    shown = describe(backbone_folder)
    assert shown.returncode == 0 and "all fit" in shown.stdout and "in place" in shown.stdout

    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "shards named by the index are missing" in describe(folder, "backbone=dream_7b_instruct").stderr
    config = json.loads((backbone_folder / "config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(backbone_folder, other)
    (other / "config.json").write_text(json.dumps({**config, "n_layers": 3}))
    shown = describe(other)
    assert shown.returncode != 0 and "blocks.2" not in shown.stdout and "do not fit config.json" in shown.stderr


def test_every_tensor_of_llada_8b_is_mapped():
    config = llama_config(
        {
            "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
            "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096,
        }
    )  # fmt: skip
    expected = expected_shapes(config, "llada")
    stored = {to_llada_name(name): (shape, "BF16") for name, shape in expected.items()}
    assert mapping_faults(stored, expected, "llada", tied=False) == []
    name = "model.transformer.blocks.31.ff_out.weight"
    stored[name] = ((1, 1), "BF16")
    stored["model.transformer.blocks.31.att_proj.weight"] = ((1,), "BF16")
    del stored["model.transformer.wte.weight"]
    faults = mapping_faults(stored, expected, "llada", tied=False)
    assert len(faults) == 3 and any("embed_tokens" in f and "missing" in f for f in faults)
    sizes = memory(config, 8_015_581_184, torch.bfloat16, 1, 512)
    assert sizes["weights"] == 2 * 8_015_581_184
    assert sizes["KV cache (cache=prefix or dual)"] == 2 * 32 * 4096 * 512 * 2
    assert sizes["a step's logits, every position asked"] == 512 * 126_464 * 2
