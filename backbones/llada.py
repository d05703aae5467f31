"""LLaDA checkpoints, loaded into transformers' own Llama."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from backbones.bidirectional import make_bidirectional
from backbones.checkpoint import write_atomically
from backbones.llada_format import llama_config, rename, to_llada_name, to_llama_name
from backbones.loading import load_tensors, model_config
from backbones.placement import CPU, Placement


def new_model(config: dict[str, Any]) -> LlamaForCausalLM:
    """A randomly initialised bidirectional Llama for a LLaDA config, in float32."""
    return make_bidirectional(LlamaForCausalLM(llama_config(config)))


def load_model(folder: Path, dtype: torch.dtype, placement: Placement = CPU) -> LlamaForCausalLM:
    """The model of a LLaDA folder."""
    config = model_config(folder, llama_config)
    return load_tensors(LlamaForCausalLM, config, folder, dtype, placement, to_llama_name, to_llada_name)


def save_checkpoint(
    folder: Path, model: nn.Module, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> None:
    """Writes `model.safetensors`, `config.json` and the tokenizer in LLaDA's format; each file whole or not at all."""
    state: dict[str, Tensor] = rename(
        {n: p.detach().to(dtype).contiguous() for n, p in model.named_parameters()}, to_llada_name
    )
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_atomically(folder / "model.safetensors", lambda f: save_file(state, f, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", lambda f: f.write_text(json.dumps(config, indent=2) + "\n"))
    tokenizer.save_pretrained(folder)
