"""LLaDA's checkpoint format: its config fields and tensor names, to and from transformers' Llama.

LLaDA (Nie et al., 2025) is a Llama with bidirectional attention; only names differ. The rotary embedding is the
half-rotated one in both, so no weight is permuted. In float32 the two are equal bit for bit; in half precision the
published code rotates in float32 and Llama does not, which adds a few percent to the error that bfloat16 makes anyway.
"""

import re
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from backbones.loading import check_config

_OUTER = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
_INNER = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
}
_OUTER_BACK = {new: old for old, new in _OUTER.items()}
_INNER_BACK = {new: old for old, new in _INNER.items()}
_BLOCK = re.compile(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")


def to_llama_name(name: str) -> str:
    """The Llama name of a LLaDA tensor; `ValueError` for a name that is not LLaDA's."""
    if name in _OUTER:
        return _OUTER[name]
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _INNER:
        return f"model.layers.{block[1]}.{_INNER[block[2]]}.weight"
    raise ValueError(f"tensor {name!r} is not part of the LLaDA format")


def to_llada_name(name: str) -> str:
    """The LLaDA name of a Llama tensor; the inverse of `to_llama_name`."""
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _INNER_BACK:
        return f"model.transformer.blocks.{layer[1]}.{_INNER_BACK[layer[2]]}.weight"
    raise ValueError(f"tensor {name!r} has no name in the LLaDA format")


# What this code assumes of a LLaDA config, by field; anything else would need other arithmetic.
_REQUIRED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "layer_norm_with_affine": True,
}
_PRESENT = ("d_model", "mlp_hidden_size", "n_layers", "n_heads", "max_sequence_length", "vocab_size")


def llama_config(llada: dict[str, Any]) -> LlamaConfig:
    """transformers' Llama config for a LLaDA `config.json`; `ValueError` names a field we cannot honour."""
    check_config(llada, "LLaDA", "llada", _REQUIRED, _PRESENT)
    return LlamaConfig(
        vocab_size=llada.get("embedding_size") or llada["vocab_size"],
        hidden_size=llada["d_model"],
        intermediate_size=llada["mlp_hidden_size"],
        num_hidden_layers=llada["n_layers"],
        num_attention_heads=llada["n_heads"],
        num_key_value_heads=llada.get("n_kv_heads") or llada["n_heads"],
        hidden_act="silu",
        max_position_embeddings=llada["max_sequence_length"],
        rms_norm_eps=llada.get("rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": llada.get("rope_theta", 10000.0)},
        tie_word_embeddings=llada.get("weight_tying", False),
        attention_bias=False,
        mlp_bias=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=llada.get("eos_token_id"),
        is_causal=False,
    )


def llada_config(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    mlp_hidden_size: int,
    vocab_size: int,
    max_sequence_length: int,
    mask_token_id: int,
    eos_token_id: int,
    pad_token_id: int,
    rope_theta: float,
) -> dict[str, Any]:
    """A `config.json` in LLaDA's own format, complete enough for its published modelling code."""
    return {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "mlp_hidden_size": mlp_hidden_size,
        "mlp_ratio": 4,
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "max_sequence_length": max_sequence_length,
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "rope_theta": rope_theta,
        "rope_full_precision": True,
        "rms_norm_eps": 1e-5,
        "weight_tying": False,
        "multi_query_attention": None,
        "init_device": "cpu",
        "init_fn": "normal",
        "init_std": 0.02,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "bias_for_layer_norm": False,
        "flash_attention": False,
        "use_cache": False,
        **_REQUIRED,
    }


def rename(state: dict[str, Tensor], to) -> dict[str, Tensor]:
    return {to(name): tensor for name, tensor in state.items()}
