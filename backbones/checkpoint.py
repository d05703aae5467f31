"""Safetensors folders: reading tensors file by file, and a fingerprint of the weights."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FINGERPRINT_BYTES = 65536


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted; `ValueError` where there is none or a shard of the index is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise ValueError(f"backbone.path={folder}: shards named by the index are missing: {missing}")
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"backbone.path={folder}: no *.safetensors file there; give the folder of a checkpoint")
    return files


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything stored in `folder`, one at a time."""
    for file in weight_files(folder):
        with _opened(file, folder) as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open has no __iter__
                yield name, shard.get_tensor(name)


def headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and safetensors dtype of every stored tensor, read from the files' headers alone."""
    found = {}
    for file in weight_files(folder):
        with _opened(file, folder) as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open has no __iter__
                part = shard.get_slice(name)
                found[name] = tuple(part.get_shape()), part.get_dtype()
    return found


def fingerprint(folder: Path) -> str:
    """16 hex digits over the name, shape, dtype and first 64 KiB of every stored tensor.

    Independent of how tensors are spread over shards, and quick for checkpoints of many gigabytes: no more than that
    is read.
    """
    parts = {}
    for file in weight_files(folder):
        with _opened(file, folder) as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open has no __iter__
                head, shape = _head(shard.get_slice(name))
                digest = hashlib.sha256(f"{name} {shape} {head.dtype} ".encode())
                digest.update(head.view(torch.uint8).numpy().tobytes())
                parts[name] = digest.digest()
    return hashlib.sha256(b"".join(parts[name] for name in sorted(parts))).hexdigest()[:16]


def _head(part) -> tuple[Tensor, tuple[int, ...]]:
    """The first `FINGERPRINT_BYTES` of a stored tensor, flat, and its whole shape."""
    shape = tuple(part.get_shape())
    first = part[:1]
    count = FINGERPRINT_BYTES // first.element_size()
    rows = -(-count // max(1, first.numel()))
    return part[:rows].flatten()[:count].contiguous(), shape


@contextmanager
def _opened(file: Path, folder: Path):
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        raise ValueError(f"backbone.path={folder}: {file.name} is damaged or truncated: {error}") from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` on a temporary name beside `path` and renames, so that `path` is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
