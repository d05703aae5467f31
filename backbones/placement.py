"""In what precision and on which devices a model lies, decided before any weight is read.

On several devices its layers run one after the other, each where it lies: for models that no single device can hold,
not for speed. Embedding, final norm and head lie on the first, with everything that decoding touches.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backbones.checkpoint import headers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMINFO = Path("/proc/meminfo")
LAYER = re.compile(r"\.(?:layers|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Placement:
    """`layers`: the device of each decoder layer; empty: all on `first`, as is everything else."""

    first: torch.device
    layers: tuple[torch.device, ...] = ()

    @property
    def spread(self) -> bool:
        return any(device != self.first for device in self.layers)

    def layer(self, index: int) -> torch.device:
        return self.layers[index] if self.layers else self.first


CPU = Placement(torch.device("cpu"))


def check_dtype(dtype: str, setting: str = "backbone.dtype") -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{setting}={dtype!r} is unknown; allowed: {', '.join(DTYPES)}")


def place(folder: Path, dtype: torch.dtype, device: str | Sequence[str], whole: bool = False) -> Placement:
    """Where the weights of `folder` go. ValueError where the devices cannot hold them, with the numbers.

    `device`: one of torch's; a list of them, over which the layers are spread in proportion to free memory; or `auto`:
    the GPU, all GPUs where one is too small, the CPU where there is none. `whole`: one device must do.
    """
    devices = candidates(device)
    if whole:
        if device != "auto" and len(devices) > 1:
            raise ValueError(f"backbone.device={device}: this kind of backbone lies on one device; name one")
        devices = devices[:1]
    sizes = [(name, math.prod(shape) * dtype.itemsize) for name, (shape, _) in headers(folder).items()]
    needed, free = sum(size for _, size in sizes), [free_memory(d) for d in devices]
    if device == "auto" and needed <= free[0]:
        devices, free = devices[:1], free[:1]
    if needed > sum(free):
        _refuse(folder, dtype, needed, devices, free)
    if len(devices) == 1:
        return Placement(devices[0])
    layers: dict[int, int] = {}
    for name, size in sizes:
        if found := LAYER.search(name):
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
    where = spread(needed - sum(layers.values()), [layers[i] for i in sorted(layers)], free)
    if where is None:
        _refuse(folder, dtype, needed, devices, free)
    return Placement(devices[0], tuple(devices[i] for i in where))


def candidates(device: str | Sequence[str], setting: str = "backbone.device") -> list[torch.device]:
    """The devices that `setting` names; ValueError for what is unknown or not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]
    names = [device] if isinstance(device, str) else list(device) if isinstance(device, Sequence) else []
    found = [_device(name) for name in names]
    if not found or None in found or len(set(found)) < len(found):
        raise ValueError(
            f"{setting}={device!r} is unknown or twice the same; allowed: auto, cpu, cuda, cuda:1, or a list such as "
            "[cuda:0,cuda:1]"
        )
    for one in found:
        if one.type == "cuda" and one.index >= gpus:
            raise ValueError(f"{setting}={device!r}: {one} is not there, torch sees {gpus} GPUs")
    return found


def _device(name: Any) -> torch.device | None:
    """Each device has one name here: `cuda` is `cuda:0`."""
    kind = re.fullmatch(r"cpu|cuda(?::(\d+))?", name) if isinstance(name, str) else None
    if kind is None:
        return None
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", int(kind[1] or 0))


def free_memory(device: torch.device) -> int:
    """Bytes that weights can have. On a CPU what the kernel calls available, which the cache of files does not lessen;
    where it does not say, all there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text(), re.M) if MEMINFO.is_file() else None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spread(rest: int, layers: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """For each layer the number of its device, in order; None where they do not fit.

    `rest`: bytes that lie on device 0 beside its layers. Each device is filled to about the same part of what is free.
    """
    level = (rest + sum(layers)) / sum(free)
    where, device, used = [], 0, rest
    for size in layers:
        while device + 1 < len(free) and used + size / 2 > level * free[device]:
            device, used = device + 1, 0
        used += size
        if used > free[device]:
            return None
        where.append(device)
    return where if rest <= free[0] else None


def connect(model: PreTrainedModel, placement: Placement) -> None:
    """Layers that lie elsewhere get their inputs there, and the final norm gets its own on the first device."""
    movers = {device: _Mover(device) for device in {placement.first, *placement.layers}}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(movers[placement.layer(index)], with_kwargs=True)
    model.model.norm.register_forward_pre_hook(movers[placement.first], with_kwargs=True)


class _Mover:
    """A forward pre-hook; what all layers of a forward share (mask, angles) is moved once a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last: dict[str, tuple[Any, Any]] = {}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _moved(args, self.device), {name: self._shared(name, value) for name, value in kwargs.items()}

    def _shared(self, name: str, value: Any) -> Any:
        source, moved = self.last.get(name, (None, None))
        if source is value:
            return moved
        self.last.pop(name, None)
        moved = _moved(value, self.device)
        if isinstance(value, Tensor | tuple):  # anything else, a cache, is not to be kept alive here
            self.last[name] = value, moved
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return tuple(_moved(part, device) for part in value) if isinstance(value, tuple) else value


def _refuse(folder: Path, dtype: torch.dtype, needed: int, devices: list[torch.device], free: list[int]) -> None:
    there = ", ".join(f"{d} has {f / 2**30:.1f} GiB free" for d, f in zip(devices, free, strict=True))
    kind = str(dtype).removeprefix("torch.")
    raise ValueError(
        f"backbone.path={folder}: the weights need {needed / 2**30:.1f} GiB in {kind}, and {there}; "
        "try backbone.dtype=bfloat16 or another backbone.device"
    )
