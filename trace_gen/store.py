"""A folder of traces: a manifest and Parquet shards, each whole or absent.

Shard k holds the trajectories k * shard_size to (k + 1) * shard_size - 1 in two files, `trajectories-k.parquet` and
`rows-k.parquet`; it counts once the manifest lists it, which is written last. So a killed run loses at most the shard
it was at, and a new run goes on after the last one listed.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from backbones.checkpoint import write_atomically
from trace_gen.schema import ROWS, SCHEMA_VERSION, TRAJECTORIES

MANIFEST = "manifest.json"


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Lines `setting: old -> new` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{name}.{k}" if name else k)]
    return [] if old == new else [f"{name}: {old!r} -> {new!r}"]


class TraceStore:
    """Traces of one `spec` (a JSON-like dict of all that decides their content) in one folder."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: str | Path) -> "TraceStore":
        """An existing store. ValueError: no manifest, an unreadable one, or another schema version."""
        folder = Path(folder)
        file = folder / MANIFEST
        if not file.is_file():
            raise ValueError(f"trace folder {folder}: no {MANIFEST} there; make one with trace_gen/generate.py")
        try:
            manifest = json.loads(file.read_text())
            version = manifest["schema_version"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"trace folder {folder}: {MANIFEST} is damaged: {error}") from error
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"trace folder {folder}: schema version {version}, this code reads {SCHEMA_VERSION}; make the traces "
                "again in another folder"
            )
        return cls(folder, manifest)

    @classmethod
    def create_or_open(
        cls, folder: str | Path, spec: dict[str, Any], code_version: str, replace: bool = False
    ) -> "TraceStore":
        """The store of `spec` in `folder`; a new one touches the disk with its first shard.

        ValueError says what differs where the folder holds other traces, unless `replace` lets those go.
        """
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            store = cls.open(folder)
            differing = differences(store.spec, spec)
            if not differing:
                return store
            if not replace:
                raise ValueError(
                    f"trace folder {folder} holds traces of another config; give another trace.out, or "
                    "trace.replace=true. Differs (there -> now): " + "; ".join(differing)
                )
            store._remove()
        return cls(folder, {"schema_version": SCHEMA_VERSION, "code_version": code_version, "spec": spec, "shards": []})

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    @property
    def kind(self) -> str:
        return self.spec["kind"]

    @property
    def counts(self) -> list[int]:
        """Trajectories of each shard."""
        return [shard["trajectories"] for shard in self.manifest["shards"]]

    def pending(self, limit: int) -> list[range]:
        """Trajectory ranges still to be made for `limit` trajectories, one a shard.

        A short last shard is made anew, unless the split holds no more problems.
        """
        size = self.spec["shard_size"]
        if self.manifest.get("exhausted"):
            limit = min(limit, sum(self.counts))
        planned = [range(start, min(start + size, limit)) for start in range(0, limit, size)]
        return [part for k, part in enumerate(planned) if k >= len(self.counts) or self.counts[k] < len(part)]

    def write_shard(self, number: int, trajectories: Sequence[dict], rows: Sequence[dict]) -> None:
        """Writes shard `number` and lists it; shards come in order."""
        assert number <= len(self.counts), "shards are written in order"
        for name, table, schema in (
            (f"trajectories-{number:05d}.parquet", trajectories, TRAJECTORIES),
            (f"rows-{number:05d}.parquet", rows, ROWS[self.kind]),
        ):
            data = pa.Table.from_pylist(list(table), schema=schema)
            write_atomically(self.folder / name, lambda path, data=data: pq.write_table(data, path, compression="zstd"))
        entry = {"trajectories": len(trajectories), "rows": len(rows)}
        self.manifest["shards"][number : number + 1] = [entry]
        self._write_manifest()

    def mark_exhausted(self) -> None:
        """Notes that the split holds no problems beyond those traced, so that a larger limit is met as well."""
        self.manifest["exhausted"] = True
        self._write_manifest()

    def _remove(self) -> None:
        """Removes the store's files, the manifest first, and nothing else of the folder."""
        (self.folder / MANIFEST).unlink()
        for pattern in ("trajectories-*.parquet", "rows-*.parquet"):
            for file in self.folder.glob(pattern):
                file.unlink()
        shutil.rmtree(self.folder / ".cache", ignore_errors=True)

    def trajectories(self) -> Dataset:
        """One row a trajectory, see `schema.TRAJECTORIES`."""
        return self._load("trajectories")

    def rows(self) -> Dataset:
        """The labelled rows, see `schema.STEPS` and `schema.MASKED`; memory-mapped."""
        return self._load("rows")

    @property
    def bytes_on_disk(self) -> int:
        return sum(f.stat().st_size for f in self.folder.glob("*.parquet"))

    def _load(self, table: str) -> Dataset:
        files = [self.folder / f"{table}-{k:05d}.parquet" for k in range(len(self.counts))]
        if not files:
            raise ValueError(f"trace folder {self.folder}: holds no shard yet")
        for file in files:
            try:
                pq.read_metadata(file)
            except (pa.ArrowInvalid, OSError) as error:
                raise ValueError(
                    f"trace folder {self.folder}: shard {file.name} is corrupt or missing ({error}); remove the folder "
                    "and make the traces again"
                ) from error
        try:
            return Dataset.from_parquet([str(f) for f in files], cache_dir=str(self.folder / ".cache"))
        except Exception as error:  # datasets wraps whatever the reader met
            raise ValueError(f"trace folder {self.folder}: a shard of {table} is corrupt: {error}") from error

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=2) + "\n"
        write_atomically(self.folder / MANIFEST, lambda path: path.write_text(text))
