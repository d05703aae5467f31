"""Small models in the formats of published checkpoints, whose weights a seed alone decides.

Uses nothing of this repository and nothing of transformers, so that published modelling code can be run on the very
same weights in an environment of its own; `tests/test_parity.py` says where that was done.
"""

import json
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

# Embeddings as small as in trained models: the first norm then sees a variance next to which its epsilon counts.
EMBEDDING_STD = 0.02
# Of the other matrices, over sqrt(inputs): sharp enough that positions with the same token differ.
GAIN = 1.7
LOGIT_STD = 3.0
RULED_OUT = 500.0

_FAMILIES = {
    "llada": ("model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight"),
    "Dream": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
}
_WRITERS = (".attn_out.weight", ".ff_out.weight", ".o_proj.weight", ".down_proj.weight")


def outer_names(config: dict[str, Any]) -> tuple[str, str, str]:
    """The stored names of the embedding, the last norm and the head."""
    return _FAMILIES[config["model_type"]]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every stored tensor of a `config.json`, by its published name; a tied head is not stored."""
    return _llada_shapes(config) if config["model_type"] == "llada" else _dream_shapes(config)


def _llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, inner, width = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    keys = d // config["n_heads"] * config["n_kv_heads"]
    embedding, norm, head = outer_names(config)
    found = {embedding: (width, d), norm: (d,)}
    if not config["weight_tying"]:
        found[head] = (width, d)
    parts = {
        "attn_norm": (d,), "ff_norm": (d,), "q_proj": (d, d), "k_proj": (keys, d), "v_proj": (keys, d),
        "attn_out": (d, d), "ff_proj": (inner, d), "up_proj": (inner, d), "ff_out": (d, inner),
    }  # fmt: skip
    for layer in range(config["n_layers"]):
        found |= {f"model.transformer.blocks.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return found


def _dream_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, inner, width = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = d // config["num_attention_heads"] * config["num_key_value_heads"]
    embedding, norm, head = outer_names(config)
    found = {embedding: (width, d), norm: (d,)}
    if not config["tie_word_embeddings"]:
        found[head] = (width, d)
    parts = {
        "input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (d, d), "self_attn.q_proj.bias": (d,),
        "self_attn.k_proj.weight": (keys, d), "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, d), "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (inner, d), "mlp.up_proj.weight": (inner, d), "mlp.down_proj.weight": (d, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    return found


def draw_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Float32 weights by published name, tensors drawn in the order of their names.

    numpy keeps the stream of `RandomState` from version to version, and uniform numbers need no library function
    that could round otherwise elsewhere. Logits come out with a standard deviation of about `LOGIT_STD`.
    """
    random = np.random.RandomState(seed)
    wanted = shapes(config)
    embedding, last_norm, head = outer_names(config)
    state = {}
    for name in sorted(wanted):
        shape = wanted[name]
        unit = 2 * random.random_sample(shape) - 1  # in [-1, 1), standard deviation 1 / sqrt(3)
        if name in (embedding, head):
            values = EMBEDDING_STD * sqrt(3) * unit
        elif name == last_norm:
            values = LOGIT_STD / (EMBEDDING_STD * sqrt(shape[0])) * (1 + unit / 2)
        elif len(shape) == 1:
            values = unit / 2 if name.endswith("bias") else 1 + unit / 2
        else:
            values = GAIN * sqrt(3 / shape[1]) * unit
        state[name] = torch.from_numpy(values.astype(np.float32))
    if head in state:
        _rule_out(state, [config["mask_token_id"], *range(config["vocab_size"], wanted[head][0])], config)
    return state


def _rule_out(state: dict[str, Tensor], ids: list[int], config: dict[str, Any]) -> None:
    """Makes the logits of `ids` strongly negative everywhere, in place: published samplers forbid no prediction.

    Channel 0 of the residual stream is the same positive number for every token and no layer writes to it; of the
    head only the rows of `ids` read it.
    """
    embedding, _, head = outer_names(config)
    state[embedding][:, 0] = EMBEDDING_STD
    for name, tensor in state.items():
        if name.endswith(_WRITERS) and name != head:
            tensor[0] = 0
    state[head][:, 0] = 0
    state[head][ids] = 0
    state[head][ids, 0] = -RULED_OUT


def save_sharded(
    folder: Path, state: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype, shards: int = 2
) -> Path:
    """Writes `config.json`, the tensors spread over `shards` files in the order of their names, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names, index = sorted(state), {}
    for i in range(shards):
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        tensors = {name: state[name].detach().to(dtype).clone() for name in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(t.numel() for t in state.values()) * dtype.itemsize
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def save_words(folder: Path, config: dict[str, Any]) -> None:
    """A tokenizer of one word an id, in the files of the model's family."""
    words = {_word(i, config): i for i in range(config["vocab_size"])}
    if config["model_type"] == "Dream":
        (folder / "vocab.json").write_text(json.dumps(words))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        return
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": _word(0, config)},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _word(i: int, config: dict[str, Any]) -> str:
    """Qwen2's tokenizer adds an id of its own unless the vocabulary has its end of text."""
    return "<|endoftext|>" if i == config["eos_token_id"] else f"w{i}"


def draw_rows(seed: int, lengths: Iterable[int], vocab_size: int) -> list[list[int]]:
    """Rows of random ids below `vocab_size`, of the given lengths."""
    random = np.random.RandomState(seed)
    return [random.randint(0, vocab_size, length).tolist() for length in lengths]
