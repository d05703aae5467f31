"""The LLaDA format, bidirectional attention, ragged batches, and damaged checkpoints."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from backbones.bidirectional import padding_inputs
from backbones.checkpoint import fingerprint, write_atomically
from backbones.denoiser import load_llada
from backbones.llada import load_model
from backbones.llada_format import llama_config, to_llada_name, to_llama_name
from backbones.loading import read_config


def test_every_tensor_has_one_llada_name(backbone):
    names = [name for name, _ in backbone.model.named_parameters()]
    llada = [to_llada_name(name) for name in names]
    assert len(set(llada)) == len(names)
    assert [to_llama_name(name) for name in llada] == names
    for name, llada_name in zip(names, llada, strict=True):
        assert llada_name.startswith("model.transformer."), name


def test_published_names():
    for name in (
        "model.transformer.wte.weight",
        "model.transformer.ln_f.weight",
        "model.transformer.ff_out.weight",
        *(
            f"model.transformer.blocks.11.{part}.weight"
            for part in (
                "q_proj",
                "k_proj",
                "v_proj",
                "attn_out",
                "ff_proj",
                "up_proj",
                "ff_out",
                "attn_norm",
                "ff_norm",
            )
        ),
    ):
        assert to_llada_name(to_llama_name(name)) == name
    # The MLP's gate is ff_proj and its output ff_out, distinct from the head of the same name.
    assert to_llama_name("model.transformer.blocks.0.ff_proj.weight") == "model.layers.0.mlp.gate_proj.weight"
    assert to_llama_name("model.transformer.ff_out.weight") == "lm_head.weight"
    with pytest.raises(ValueError, match="att_proj"):
        to_llama_name("model.transformer.blocks.0.att_proj.weight")


def test_real_llada_8b_shapes():
    """LLaDA-8B's published config on the meta device: the parameter count is the published one."""
    from transformers import LlamaForCausalLM

    config = llama_config(
        {
            "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
            "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096,
            "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False, "eos_token_id": 126081,
        }
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == 8_015_581_184
    assert len({to_llada_name(n) for n, _ in model.named_parameters()}) == 3 + 32 * 9


def scored(backbone, rows, width=None):
    """Logits at all positions of each row, decoded as one batch."""
    length = width or max(len(r) for r in rows)
    pad = torch.tensor([length - len(r) for r in rows])
    tokens = torch.tensor([[0] * (length - len(r)) + r for r in rows])
    asked = torch.arange(length) >= pad[:, None]
    return backbone.logits(tokens, pad, asked).split([len(r) for r in rows])


ROWS = [[5, 9, 40, 41, 17], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44], [7]]


def test_a_row_is_the_same_alone_and_in_a_ragged_batch(backbone):
    together = scored(backbone, ROWS)
    for row, logits in zip(ROWS, together, strict=True):
        torch.testing.assert_close(scored(backbone, [row])[0], logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scored(backbone, [row], width=20)[0], logits, atol=1e-5, rtol=1e-5)


def test_attention_is_bidirectional_with_and_without_padding(backbone):
    """A later token changes earlier logits, whether or not a mask is built."""
    for width in (None, 9):
        base, changed = [40, 41, 42, 43, 44], [40, 41, 42, 43, 50]
        a, b = scored(backbone, [base], width)[0], scored(backbone, [changed], width)[0]
        assert not torch.allclose(a[0], b[0])


def test_only_asked_positions_come_back_in_row_major_order(backbone):
    tokens, pad = torch.tensor([ROWS[1], ROWS[1][::-1]]), torch.zeros(2, dtype=torch.long)
    asked = torch.zeros_like(tokens, dtype=torch.bool)
    asked[0, 7] = asked[1, 2] = asked[1, 9] = True
    some = backbone.logits(tokens, pad, asked)
    everything = backbone.logits(tokens, pad, torch.ones_like(asked)).view(2, 12, -1)
    torch.testing.assert_close(some, torch.stack([everything[0, 7], everything[1, 2], everything[1, 9]]))


def test_padding_inputs():
    assert "attention_mask" not in padding_inputs(torch.tensor([0, 0]), 4, padded=False)
    inputs = padding_inputs(torch.tensor([0, 2]), 4, padded=True)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert inputs["attention_mask"][1, 0, 3].tolist() == [False, False, True, True]


def test_what_a_backbone_offers(backbone, tokenizer):
    assert backbone.mask_id == tokenizer.mask_token_id and backbone.eos_id == tokenizer.eos_token_id
    assert backbone.embedding.shape == (backbone.vocab_size, 32)
    assert backbone.mask_id in backbone.forbidden_ids
    assert not any(p.requires_grad for p in backbone.model.parameters())
    ids = backbone.encode("How many?")
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[-1:]) == "<|assistant|>"
    text = tokenizer("56 apples").input_ids
    assert backbone.decode(torch.tensor([*text, backbone.eos_id, 77])) == "56 apples"
    assert len(tokenizer("1234", add_special_tokens=False).input_ids) == 4, "digits are split one by one"


def test_chat_markup_can_be_left_out_but_not_made_up(tmp_path, backbone_folder, tokenizer):
    plain = load_llada(str(backbone_folder), name="plain", chat_template=False)
    assert plain.encode("How many?") == tuple(tokenizer("How many?").input_ids) and not plain.chat
    asked = load_llada(str(backbone_folder), name="asked", chat_template=True)
    assert asked.encode("How many?") == load_llada(str(backbone_folder), name="auto").encode("How many?")
    folder = shutil.copytree(backbone_folder, tmp_path / "base")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_llada(str(folder), name="base").encode("How many?") == plain.encode("How many?")
    with pytest.raises(ValueError, match="backbone.chat_template=true: .* has no chat template"):
        load_llada(str(folder), name="base", chat_template=True)


def test_ids_without_a_tokenizer_entry_are_forbidden(tmp_path, backbone_folder):
    folder = shutil.copytree(backbone_folder, tmp_path / "wide")
    config = read_config(folder)
    state = load_file(folder / "model.safetensors")
    for name in ("model.transformer.wte.weight", "model.transformer.ff_out.weight"):
        state[name] = torch.cat([state[name], torch.zeros(5, 32)])
    save_file(state, folder / "model.safetensors")
    vocabulary = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "embedding_size": vocabulary + 5}))
    wide = load_llada(str(folder), name="wide", device="cpu")
    assert set(range(vocabulary, vocabulary + 5)) <= set(wide.forbidden_ids.tolist())


def test_fingerprint_knows_the_weights_and_not_the_sharding(tmp_path, backbone_folder, backbone):
    state = load_file(backbone_folder / "model.safetensors")
    names = sorted(state)
    split, changed = tmp_path / "split", tmp_path / "changed"
    for folder in (split, changed):
        folder.mkdir()
    save_file({n: state[n] for n in names[:5]}, split / "model-00001-of-00002.safetensors")
    save_file({n: state[n] for n in names[5:]}, split / "model-00002-of-00002.safetensors")
    assert fingerprint(split) == fingerprint(backbone_folder) == backbone.fingerprint
    state[names[0]] = state[names[0]] + 1e-3
    save_file(state, changed / "model.safetensors")
    assert fingerprint(changed) != fingerprint(split)


def damaged(tmp_path, backbone_folder, name):
    folder = shutil.copytree(backbone_folder, tmp_path / name)
    return folder, json.loads((folder / "config.json").read_text())


def test_damaged_checkpoints_are_refused(tmp_path, backbone_folder):
    with pytest.raises(ValueError, match="no config.json"):
        load_llada(str(tmp_path), name="x")
    with pytest.raises(ValueError, match="backbone.dtype='int8'.*float32"):
        load_llada(str(backbone_folder), name="x", dtype="int8")

    folder, config = damaged(tmp_path, backbone_folder, "none")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        load_model(folder, torch.float32)

    folder, config = damaged(tmp_path, backbone_folder, "short")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_model(folder, torch.float32)

    folder, config = damaged(tmp_path, backbone_folder, "other")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="backbone.path=.*other: model_type='gpt2'"):
        load_model(folder, torch.float32)

    for field in ("d_model", "n_heads", "max_sequence_length"):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != field}))
        with pytest.raises(ValueError, match=f"backbone.path=.*other: config.json lacks {field}"):
            load_llada(str(folder), name="x")

    folder, config = damaged(tmp_path, backbone_folder, "mute")
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="backbone.path=.*mute: its tokenizer cannot be read"):
        load_llada(str(folder), name="x")

    folder, config = damaged(tmp_path, backbone_folder, "alibi")
    (folder / "config.json").write_text(json.dumps({**config, "alibi": True}))
    with pytest.raises(ValueError, match="alibi=True"):
        load_model(folder, torch.float32)

    folder, config = damaged(tmp_path, backbone_folder, "shape")
    (folder / "config.json").write_text(json.dumps({**config, "mlp_hidden_size": 65}))
    with pytest.raises(ValueError, match="does not fit config.json"):
        load_model(folder, torch.float32)

    folder, config = damaged(tmp_path, backbone_folder, "missing")
    state = load_file(folder / "model.safetensors")
    del state["model.transformer.blocks.1.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing.*blocks.1.up_proj"):
        load_model(folder, torch.float32)

    folder, config = damaged(tmp_path, backbone_folder, "shards")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="shards named by the index are missing"):
        load_model(folder, torch.float32)


def test_a_failed_write_leaves_nothing(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def fail(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, fail)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_eager_attention_sees_what_sdpa_sees(backbone, backbone_folder):
    eager = load_llada(str(backbone_folder), name="eager", attention="eager")
    assert backbone.model.config._attn_implementation == "sdpa" and eager.model.config._attn_implementation == "eager"
    length, every_B = 12, torch.ones(3, dtype=torch.bool)
    pad_B = torch.tensor([length - len(row) for row in ROWS])
    tokens_BT = torch.tensor([[0] * (length - len(row)) + row for row in ROWS])
    real_BT = torch.arange(length) >= pad_B[:, None]
    expected = backbone.logits(tokens_BT, pad_B, real_BT)
    torch.testing.assert_close(eager.logits(tokens_BT, pad_B, real_BT), expected, atol=1e-5, rtol=1e-5)
    cached = eager.cached_logits(tokens_BT, pad_B, real_BT, real_BT, every_B, eager.new_cache(3, length + 2))
    torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="backbone.attention='flash_attention_2' is unknown; allowed: sdpa, eager"):
        load_llada(str(backbone_folder), name="x", attention="flash_attention_2")
