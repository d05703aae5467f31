"""Dream and DiffuCoder checkpoints, loaded into transformers' own Qwen2."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from backbones.bidirectional import make_bidirectional
from backbones.dream_format import qwen2_config
from backbones.loading import load_tensors, model_config
from backbones.placement import CPU, Placement


def new_model(config: dict[str, Any]) -> Qwen2ForCausalLM:
    """A randomly initialised bidirectional Qwen2 for a Dream config, in float32."""
    return make_bidirectional(Qwen2ForCausalLM(qwen2_config(config)))


def load_model(folder: Path, dtype: torch.dtype, placement: Placement = CPU) -> Qwen2ForCausalLM:
    """The model of a Dream folder."""
    return load_tensors(Qwen2ForCausalLM, model_config(folder, qwen2_config), folder, dtype, placement)
