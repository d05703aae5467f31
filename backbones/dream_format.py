"""Dream's checkpoint format: a Qwen2 with bidirectional attention, tensor names unchanged.

Dream (Ye et al., 2025) and DiffuCoder (Gong et al., 2025) share it. Both were initialised from an autoregressive model
and keep its shift: the logits at position i - 1 predict position i.
"""

from typing import Any

from transformers import Qwen2Config

from backbones.loading import check_config

# What this code assumes of a Dream config, by field; anything else would need other arithmetic.
_REQUIRED = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
_PRESENT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip


def qwen2_config(dream: dict[str, Any]) -> Qwen2Config:
    """transformers' Qwen2 config for a Dream `config.json`; `ValueError` names a field we cannot honour."""
    check_config(dream, "Dream", "Dream", _REQUIRED, _PRESENT)
    return Qwen2Config(
        vocab_size=dream["vocab_size"],
        hidden_size=dream["hidden_size"],
        intermediate_size=dream["intermediate_size"],
        num_hidden_layers=dream["num_hidden_layers"],
        num_attention_heads=dream["num_attention_heads"],
        num_key_value_heads=dream.get("num_key_value_heads") or dream["num_attention_heads"],
        hidden_act="silu",
        max_position_embeddings=dream["max_position_embeddings"],
        rms_norm_eps=dream.get("rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": dream.get("rope_theta", 10000.0)},
        tie_word_embeddings=dream.get("tie_word_embeddings", False),
        use_sliding_window=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=dream.get("eos_token_id"),
        is_causal=False,
    )
