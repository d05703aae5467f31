"""A random Dream in the published format: shards with an index, vocab.json and merges.txt."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from backbones.dream import new_model
from tests.published import save_sharded


def dream_config(tokenizer: PreTrainedTokenizerFast, **changes) -> dict[str, Any]:
    return {
        "model_type": "Dream",
        "architectures": ["DreamModel"],
        "vocab_size": len(tokenizer) + 7,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        **changes,
    }


def save_dream(
    folder: Path, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype = torch.float32, **changes
) -> tuple[Path, Qwen2ForCausalLM]:
    """Writes a random model with `changes` to its config; returns the folder and the model in float32."""
    torch.manual_seed(5)
    config = dream_config(tokenizer, **changes)
    model = new_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5)
            elif "bias" in name:
                parameter.normal_(std=0.3)
    save_sharded(folder, dict(model.named_parameters()), config, dtype)
    _save_tokenizer(folder, tokenizer)
    return folder, model.eval()


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.model.save(str(folder))
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {
        str(i): {"content": token, "special": True, **plain}
        for token, i in tokenizer.get_vocab().items()
        if token.startswith("<|")
    }
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "mask_token": tokenizer.mask_token,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
