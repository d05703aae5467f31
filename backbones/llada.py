"""LLaDA checkpoints, loaded into transformers' own Llama."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from backbones.bidirectional import make_bidirectional
from backbones.checkpoint import tensors, write_atomically
from backbones.llada_format import llama_config, rename, to_llada_name, to_llama_name


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"backbone.path={folder}: no config.json there; give the folder of a LLaDA checkpoint")
    return json.loads(file.read_text())


def new_model(config: dict[str, Any]) -> LlamaForCausalLM:
    """A randomly initialised bidirectional Llama for a LLaDA config, in float32."""
    return make_bidirectional(LlamaForCausalLM(llama_config(config)))


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """The model of a LLaDA folder. Tensors go in one by one, so the peak is about the weights' own size."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(read_config(folder)))
    # `to_empty` keeps tensors untouched until each is loaded; buffers are rebuilt since they are not stored.
    model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    wanted = dict(model.named_parameters())
    left = set(wanted) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in tensors(folder):
        new = to_llama_name(name)
        if new not in wanted or wanted[new].shape != tensor.shape:
            raise ValueError(f"backbone.path={folder}: {name} {tuple(tensor.shape)} does not fit config.json")
        with torch.no_grad():
            wanted[new].copy_(tensor)
        left.discard(new)
    if left:
        raise ValueError(f"backbone.path={folder}: tensors are missing: {sorted(map(to_llada_name, left))[:5]}")
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return make_bidirectional(model).eval()


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
