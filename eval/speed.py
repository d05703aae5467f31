"""Where the time of a decoding step goes: methods, caches and batch sizes side by side in one run, beside a plain loop.

python eval/speed.py 'methods=[threshold,eb_decode]' 'caches=[none,dual]' limit=16
"""

import json
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from backbones.checkpoint import write_atomically
from eval.plain_loop import PlainLoop
from eval.runner import choose_problems
from infer.canvas import text_length
from infer.compose import build_method, expand
from infer.loop import STAGES, Decoder

PLAIN = {"plain loop, sequential": None, "plain loop, threshold": 0.9}


def contestants(cfg: DictConfig, overrides: list[str], backbone, batch_size: int) -> dict[tuple[str, str], object]:
    """Decoders by method and cache, and the plain loop's at batch size 1."""
    found = {}
    for entry in expand(cfg.methods):
        for cache in cfg.caches:
            setting = f"{entry}{',' if ':' in entry else ':'}cache={cache}"
            method = build_method("speed", setting, overrides)
            found[entry, cache] = Decoder(
                backbone,
                method,
                gen_length=cfg.decode.gen_length,
                batch_size=batch_size,
                seed=cfg.decode.seed,
                timed=True,
            )
    if cfg.plain and batch_size == 1:
        d = cfg.decode
        for label, tau in PLAIN.items():
            found[label, "none"] = PlainLoop(
                backbone, gen_length=d.gen_length, block_length=d.block_length, stop=d.stop, tau=tau
            )
    return found


def measure(racers: dict, requests: list, batch_size: int, bar: tqdm) -> list[dict]:
    """Every racer over the same prompts, a few at a time in turn, so that a slow minute hits all; one row a racer."""
    wall, done, computed = dict.fromkeys(racers, 0.0), {k: [] for k in racers}, dict.fromkeys(racers, 0)
    for racer in racers.values():
        racer.warm_up(requests[:batch_size])
    names = list(racers)
    chunk = max(4, batch_size)
    for turn, start in enumerate(range(0, len(requests), chunk)):
        part = requests[start : start + chunk]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            done[name] += list(racers[name].run(part))
            wall[name] += time.perf_counter() - begin
            if isinstance(racers[name], Decoder):
                computed[name] += racers[name].step_cache.computed
            bar.update(len(part))
    rows = []
    for name, racer in racers.items():
        clock, nfe = racer.clock, sum(c.nfe for c in done[name])
        tokens = sum(text_length(c.tokens.tolist(), racer.backbone.eos_id) for c in done[name])
        inside = sum(clock.seconds.values())
        positions = computed[name] or sum(c.nfe * (len(c.prompt) + len(c.tokens)) for c in done[name])
        rows.append(
            {
                "method": name[0],
                "cache": name[1],
                "batch_size": batch_size,
                "n": len(done[name]),
                "nfe": nfe / len(done[name]),
                "tokens_per_second": tokens / wall[name],
                "prompts_per_second": len(done[name]) / wall[name],
                "step_ms": 1000 * wall[name] / clock.forwards,
                "positions_per_row": positions / nfe,
                **{f"{s}_ms": 1000 * clock.seconds[s] / clock.forwards for s in STAGES},
                "outside_backbone": 1 - clock.seconds["backbone"] / inside,
            }
        )
    return rows


def ratios(rows: list[dict]) -> list[str]:
    """Each cache and batch size against the plain loop, in sentences."""
    at = {(r["method"], r["cache"], r["batch_size"]): r for r in rows}
    lines = []
    for label in PLAIN:
        name, plain = label.rpartition(" ")[2], at.get((label, "none", 1))
        for (method, cache, size), row in at.items():
            if plain is None or method != name:
                continue
            speed = row["prompts_per_second"] / plain["prompts_per_second"]
            lines.append(
                f"{name}, cache {cache}, batch {size}: {speed:.2f}x the prompts per second of the plain loop "
                f"without a cache at batch 1 (NFE {row['nfe']:.1f} and {plain['nfe']:.1f})"
            )
    return lines


@hydra.main(config_path="../conf", config_name="speed", version_base="1.3")
def main(cfg: DictConfig) -> None:
    if cfg.limit < 1 or not cfg.caches or any(b < 1 for b in cfg.batch_sizes):
        raise ValueError("limit and batch_sizes need at least 1, caches at least one name")
    overrides = list(HydraConfig.get().overrides.task)
    backbone, task = instantiate(cfg.backbone), instantiate(cfg.task)
    problems = choose_problems(task, cfg.split, backbone, cfg.decode.gen_length, cfg.limit)
    requests = [request for _, request in problems.values()]
    rows: list[dict] = []
    for size in cfg.batch_sizes:
        racers = contestants(cfg, overrides, backbone, size)
        with tqdm(total=len(requests) * len(racers), desc=f"batch {size}", unit="completion", mininterval=1) as bar:
            rows += measure(racers, requests, size, bar)
    table = Table(
        title=f"{len(requests)} prompts, {cfg.decode.gen_length} positions, {backbone.dtype} on {backbone.device}"
    )
    head = ("method", "cache", "batch", "NFE", "tok/s", "prompts/s", "ms/step", "positions", *STAGES, "not backbone")
    for title in head:
        table.add_column(title, justify="left" if title in ("method", "cache") else "right")
    for r in rows:
        table.add_row(
            r["method"],
            r["cache"],
            str(r["batch_size"]),
            f"{r['nfe']:.1f}",
            f"{r['tokens_per_second']:.1f}",
            f"{r['prompts_per_second']:.2f}",
            f"{r['step_ms']:.1f}",
            f"{r['positions_per_row']:.0f}",
            *(f"{r[f'{s}_ms']:.2f}" for s in STAGES),
            f"{r['outside_backbone']:.1%}",
        )
    console = Console(width=170)
    console.print(table)
    console.print("Stages in ms a step. Positions: computed per row and step, prompt included.", highlight=False)
    for line in ratios(rows):
        console.print(line, highlight=False)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "speed.json", lambda path: path.write_text(json.dumps(rows, indent=2) + "\n"))
    console.print(f"{out / 'speed.json'}")


if __name__ == "__main__":
    main()
