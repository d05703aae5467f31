"""What a checkpoint is, from its headers alone: architecture, ids, chat template, memory, and the defaults that apply.

python backbones/describe.py backbone=llada_8b_instruct backbone.path=/path/to/it batch_size=8 length=1024
"""

import math

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2Tokenizer

from backbones.checkpoint import headers, weight_files
from backbones.denoiser import special_id
from backbones.dream_format import qwen2_config
from backbones.hub import find_checkpoint
from backbones.llada_format import llama_config, to_llama_name
from backbones.loading import model_config, read_config
from backbones.placement import DTYPES, check_dtype
from backbones.text import read_tokenizer, uses_chat

FORMATS = {"llada": (llama_config, PreTrainedTokenizerFast), "Dream": (qwen2_config, Qwen2Tokenizer)}


def expected_shapes(config: PretrainedConfig, model_type: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the architecture has, from the meta device."""
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM

    with torch.device("meta"):
        model = (LlamaForCausalLM if model_type == "llada" else Qwen2ForCausalLM)(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def mapping_faults(stored: dict, expected: dict, model_type: str, tied: bool) -> list[str]:
    """What does not fit between the stored tensors and the architecture; empty where all does."""
    faults, left = [], dict(expected)
    if tied:
        left.pop("lm_head.weight", None)
    for name, (shape, _) in stored.items():
        try:
            new = to_llama_name(name) if model_type == "llada" else name
        except ValueError as error:
            faults.append(str(error))
            continue
        if tied and new == "lm_head.weight":
            continue
        if new not in expected:
            faults.append(f"{name} is left over")
        elif expected[new] != shape:
            faults.append(f"{name} is {shape}, config.json says {expected[new]}")
        left.pop(new, None)
    return faults + [f"{name} is missing" for name in sorted(left)]


def memory(
    config: PretrainedConfig, parameters: int, dtype: torch.dtype, batch_size: int, length: int
) -> dict[str, int]:
    """Bytes by purpose: exact for weights and cache, an upper bound for one step's work."""
    size = dtype.itemsize
    head = config.hidden_size // config.num_attention_heads
    tokens = batch_size * length
    widest = max(4 * config.hidden_size, 3 * config.intermediate_size)
    return {
        "weights": parameters * size,
        "KV cache (cache=prefix or dual)": 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * head
        * tokens
        * size,
        "a step's activations": tokens * (widest + 2 * config.hidden_size) * size,
        "a step's logits, every position asked": tokens * config.vocab_size * size,
        # Float32, in pieces of at most 2**25 elements; up to five tensors of a piece are there at a time.
        "their statistics": 5 * 4 * min(tokens * config.vocab_size, 2**25),
    }


@hydra.main(config_path="../conf", config_name="describe", version_base="1.3")
def main(cfg: DictConfig) -> None:
    b = cfg.backbone
    check_dtype(b.dtype)
    if cfg.batch_size < 1 or cfg.length < 1:
        raise ValueError(f"batch_size={cfg.batch_size}, length={cfg.length}: need at least 1")
    folder = find_checkpoint(b.path, b.get("revision"))
    raw = read_config(folder)
    model_type = raw.get("model_type")
    if model_type not in FORMATS:
        raise ValueError(f"backbone.path={folder}: model_type={model_type!r}; known: {', '.join(FORMATS)}")
    to_config, tokenizer_class = FORMATS[model_type]
    config, stored = model_config(folder, to_config), headers(folder)
    faults = mapping_faults(stored, expected_shapes(config, model_type), model_type, bool(config.tie_word_embeddings))
    parameters = sum(math.prod(shape) for shape, _ in stored.values())
    tokenizer = read_tokenizer(folder, tokenizer_class)
    chat = uses_chat(tokenizer, b.get("chat_template"))

    table = Table(show_header=False, title=str(b.name))
    rows = {
        "folder": folder,
        "architecture": f"{model_type}: {config.num_hidden_layers} layers, {config.hidden_size} wide, "
        f"{config.num_attention_heads} heads ({config.num_key_value_heads} of keys), MLP {config.intermediate_size}",
        "logits": "predict the next position: shifted by the loader" if model_type == "Dream" else "in place",
        "stored": f"{parameters:,} parameters, {len(stored)} tensors, {len(weight_files(folder))} files, "
        + ", ".join(sorted({dtype for _, dtype in stored.values()})),
        "tensors": "all fit" if not faults else "; ".join(faults[:5]),
        "vocabulary": f"{config.vocab_size:,} ids, {len(tokenizer.get_vocab()):,} of them in the tokenizer",
        "mask, eos": f"{special_id(folder, raw, 'mask_token_id')}, {special_id(folder, raw, 'eos_token_id')}",
        "special tokens": ", ".join(f"{i} {t}" for i, t in _special(tokenizer)),
        "chat template": ("in the tokenizer; " if tokenizer.chat_template else "none; ")
        + ("prompts are sent as a user's message" if chat else "prompts are sent as they are"),
        "longest": f"{config.max_position_embeddings:,} positions",
        "published settings": ", ".join(f"{k} {v}" for k, v in cfg.published.items()),
    }
    for key, value in rows.items():
        table.add_row(key, str(value))
    console = Console(width=120)
    console.print(table)
    need = Table("memory", "size", title=f"{b.dtype}, batch {cfg.batch_size}, {cfg.length} positions")
    for key, value in memory(config, parameters, DTYPES[b.dtype], cfg.batch_size, cfg.length).items():
        need.add_row(key, f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.1f} MiB")
    console.print(need)
    if faults:
        raise ValueError(f"backbone.path={folder}: {len(faults)} tensors do not fit config.json: {faults[:3]}")


def _special(tokenizer) -> list[tuple[int, str]]:
    return sorted(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


if __name__ == "__main__":
    main()
