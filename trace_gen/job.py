"""Makes the traces that a config asks for: resolves the spec, decodes what is missing, writes shards, sums up."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from backbones.base import Backbone
from infer.canvas import Completion, Request
from infer.compose import hash_routers, make_method
from infer.loop import Decoder
from infer.prompting import make_requests
from tasks.problem import Task, check_split
from trace_gen.masked import masked_rows
from trace_gen.recorder import Recorder, trajectory_row
from trace_gen.schema import ROWS
from trace_gen.store import TraceStore

# Settings of `decode` that change what is decoded; the batch size does not.
DECODE_SETTINGS = ("gen_length", "block_length", "stop", "temperature", "seed")


@dataclass(frozen=True)
class Summary:
    """Figures of a trace folder: counts, `right` share of right predictions, and for a replay `lead_time`, the mean
    number of steps between a prediction being right for good and being committed."""

    trajectories: int
    positions: int
    right: float
    lead_time: float | None
    megabytes: float

    def __str__(self) -> str:
        lead = "" if self.lead_time is None else f", mean lead time {self.lead_time:.2f} steps"
        return (
            f"{self.trajectories} trajectories, {self.positions} rows, {self.right:.1%} of predictions right{lead}, "
            f"{self.megabytes:.1f} MB"
        )


def make_spec(cfg: DictConfig, backbone: Backbone) -> dict[str, Any]:
    """All that decides the content of the traces, JSON-like."""
    spec = {
        "kind": cfg.trace.kind,
        "backbone": {
            "name": backbone.name,
            "fingerprint": backbone.fingerprint,
            "tokenizer": backbone.vocabulary,
            "chat": backbone.chat,
            "vocab_size": backbone.vocab_size,
            "mask_id": backbone.mask_id,
            "dtype": str(backbone.dtype).removeprefix("torch."),
        },
        "method": hash_routers(OmegaConf.to_container(cfg.method, resolve=True)),
        "decode": {name: cfg.decode[name] for name in DECODE_SETTINGS},
        "task": OmegaConf.to_container(cfg.task, resolve=True),
        "split": cfg.trace.split,
        "shard_size": cfg.trace.shard_size,
    }
    if cfg.trace.kind == "masked":
        spec["ratios"] = list(cfg.trace.ratios)
    return spec


def make_traces(cfg: DictConfig, backbone: Backbone, task: Task) -> TraceStore:
    """Opens or makes the traces of `cfg`; says so where nothing is left to do. Bad settings leave nothing behind."""
    _check(cfg)
    recorder = Recorder()
    replay = cfg.trace.kind == "replay"
    decoder = Decoder(
        backbone,
        make_method(cfg.method),
        observers=[recorder] if replay else [],
        extra_needs=recorder.needs if replay else frozenset(),
        **{k: cfg.decode[k] for k in ("gen_length", "batch_size", "temperature", "seed")},
    )
    store = TraceStore.create_or_open(cfg.trace.out, make_spec(cfg, backbone), code_version(), cfg.trace.replace)
    pending = store.pending(cfg.trace.limit)
    if not pending:
        print(f"traces in {store.folder} are there already, {sum(store.counts)} trajectories")
        return store
    first = pending[0].start
    if first:
        print(f"going on in {store.folder} after {first} trajectories")
    requests = _requests(cfg, backbone, task, first)
    if not requests and not first:
        raise ValueError(f"task={task.name}: no problem left in split {cfg.trace.split!r} that fits the backbone")
    index_of = {r.id: first + i for i, r in enumerate(requests)}
    last = first + len(requests)
    shards = [range(p.start, min(p.stop, last)) for p in pending if p.start < last]
    done: dict[int, Completion] = {}
    progress = tqdm(total=last, initial=first, desc=f"{cfg.trace.kind} traces", unit="trajectory", mininterval=1)
    for completion in decoder.run(requests):
        done[index_of[completion.id]] = completion
        progress.update()
        while shards and all(i in done for i in shards[0]):
            part = [(i, done.pop(i)) for i in shards.pop(0)]
            if replay:
                rows = [row for i, c in part for row in recorder.labelled(i, c)]
            else:
                rows = list(_masked(cfg, backbone, part))
            store.write_shard(part[0][0] // cfg.trace.shard_size, [trajectory_row(i, c) for i, c in part], rows)
    progress.close()
    if last < cfg.trace.limit:
        print(f"split {cfg.trace.split!r} holds {last} problems that fit, fewer than trace.limit={cfg.trace.limit}")
        store.mark_exhausted()
    return store


def code_version() -> str:
    """The package's version and, in a git checkout, its commit."""
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return version("dllm-routers") + (f"+{found.stdout.strip()}" if found.returncode == 0 else "")


def _check(cfg: DictConfig) -> None:
    """ValueError naming a setting of `trace` that cannot be."""
    if cfg.trace.kind not in ROWS:
        raise ValueError(f"trace.kind={cfg.trace.kind!r} is unknown; allowed: {', '.join(ROWS)}")
    if cfg.trace.limit < 1 or cfg.trace.shard_size < 1:
        raise ValueError(f"trace.limit={cfg.trace.limit}, trace.shard_size={cfg.trace.shard_size}: need at least 1")
    check_split(cfg.trace.split)
    if cfg.trace.kind == "masked" and not (cfg.trace.ratios and all(0 < r <= 1 for r in cfg.trace.ratios)):
        raise ValueError(f"trace.ratios={list(cfg.trace.ratios)}: need at least one, each in (0, 1]")


def _requests(cfg: DictConfig, backbone: Backbone, task: Task, first: int) -> list[Request]:
    prompts = ((p.id, p.prompt) for p in task.problems(cfg.trace.split))
    return list(islice(make_requests(backbone, prompts, cfg.decode.gen_length), first, cfg.trace.limit))


def _masked(cfg: DictConfig, backbone: Backbone, part: list[tuple[int, Completion]]) -> Iterator[dict]:
    rows = []
    size = cfg.decode.batch_size
    for ratio in cfg.trace.ratios:
        for start in range(0, len(part), size):
            chunk = part[start : start + size]
            rows += masked_rows(backbone, chunk, ratio, cfg.decode.block_length, cfg.decode.seed)
    return sorted(rows, key=lambda row: (row["trajectory"], -row["ratio"]))


def summarise(store: TraceStore) -> Summary:
    """Reads the whole store once."""
    rows = store.rows().with_format("numpy")
    positions = right = 0
    waits: list[np.ndarray] = []
    committed = {t["trajectory"]: np.array(t["committed_at"]) for t in store.trajectories()}
    current, first_stable = None, {}
    for row in rows:
        positions += len(row["position"])
        right += int(np.sum(row["right"]))
        if store.kind != "replay":
            continue
        if row["trajectory"] != current:
            current, first_stable = int(row["trajectory"]), {}
        for position in np.asarray(row["position"])[np.asarray(row["stable"], dtype=bool)]:
            if position not in first_stable:
                first_stable[position] = int(row["step"])
                waits.append(committed[current][position] - row["step"])
    return Summary(
        trajectories=sum(store.counts),
        positions=positions,
        right=right / max(1, positions),
        lead_time=float(np.mean([w for w in waits if w >= 0] or [0.0])) if store.kind == "replay" else None,
        megabytes=store.bytes_on_disk / 1e6,
    )
