"""A checkpoint folder's tensors into a transformers model, one by one."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from backbones.bidirectional import make_bidirectional
from backbones.checkpoint import tensors
from backbones.placement import Placement, connect


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"backbone.path={folder}: no config.json there; give the folder of a checkpoint")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"backbone.path={folder}: config.json is damaged: {error}") from error


def model_config(folder: Path, convert: Callable[[dict[str, Any]], PretrainedConfig]) -> PretrainedConfig:
    """transformers' config for the folder's, by `convert`; its ValueErrors name the folder."""
    config = read_config(folder)
    try:
        return convert(config)
    except ValueError as error:
        raise ValueError(f"backbone.path={folder}: {error}") from error


def check_config(
    config: dict[str, Any], label: str, model_type: str, required: dict[str, Any], present: Iterable[str]
) -> None:
    """ValueError where a `config.json` is another architecture's, sets a field otherwise than `required`, or lacks one
    that must be `present`."""
    if config.get("model_type") != model_type:
        raise ValueError(
            f"model_type={config.get('model_type')!r} in config.json; a {label} checkpoint has {model_type!r}"
        )
    for field, value in required.items():
        if config.get(field, value) != value:
            raise ValueError(f"{field}={config[field]!r} in config.json; only {value!r} is supported")
    missing = [field for field in present if config.get(field) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}, which a {label} checkpoint has")


def load_tensors(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    placement: Placement,
    new_name: Callable[[str], str] = lambda name: name,
    stored_name: Callable[[str], str] = lambda name: name,
) -> PreTrainedModel:
    """A bidirectional `model_class` with the weights of `folder`.

    Tensors are read and copied one by one, so the peak is about the weights' own size. `new_name` gives a stored
    tensor's name in `model_class`, `stored_name` is its inverse. ValueError where a tensor is missing, left over, or
    of another shape.
    """
    with torch.device("meta"):
        model = model_class(config)
    # `to_empty` keeps tensors untouched until each is loaded; buffers are rebuilt since they are not stored.
    model.to(dtype)
    trunk = model.model
    for index, layer in enumerate(trunk.layers):
        layer.to_empty(device=placement.layer(index))
    for part in (trunk.embed_tokens, trunk.norm, model.lm_head):
        part.to_empty(device=placement.first)
    trunk.rotary_emb = type(trunk.rotary_emb)(model.config).to(placement.first)
    wanted = dict(model.named_parameters())
    tied = bool(config.tie_word_embeddings)
    left = set(wanted) - ({"lm_head.weight"} if tied else set())
    for name, tensor in tensors(folder):
        new = new_name(name)
        if tied and new == "lm_head.weight":
            continue  # some checkpoints store the tied matrix twice
        if new not in wanted or wanted[new].shape != tensor.shape:
            raise ValueError(f"backbone.path={folder}: {name} {tuple(tensor.shape)} does not fit config.json")
        with torch.no_grad():
            wanted[new].copy_(tensor)
        left.discard(new)
    if left:
        raise ValueError(f"backbone.path={folder}: tensors are missing: {sorted(map(stored_name, left))[:5]}")
    if tied:
        model.tie_weights()
    if placement.spread:
        connect(model, placement)
    return make_bidirectional(model).eval()
