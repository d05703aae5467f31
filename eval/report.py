"""Tables, files and pictures of a comparison."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from backbones.checkpoint import write_atomically
from eval.metrics import Sample

matplotlib.use("Agg")


def _accuracy(row: dict) -> str:
    return f"{row['accuracy']:.1%} [{row['accuracy_low']:.1%}, {row['accuracy_high']:.1%}]"


COLUMNS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "method": ("method", lambda r: r["method"]),
    "accuracy": ("accuracy [95% interval]", _accuracy),
    "nfe": ("NFE", lambda r: f"{r['nfe']:.1f}"),
    "tokens_per_forward": ("tok/fwd", lambda r: f"{r['tokens_per_forward']:.2f}"),
    "tokens_per_second": ("tok/s", lambda r: f"{r['tokens_per_second']:.1f}"),
    "latency_ms": ("latency ms", lambda r: f"{r['latency_ms']:.0f}"),
    "speedup_nfe": ("x NFE", lambda r: f"{r['speedup_nfe']:.2f}"),
    "speedup_tps": ("x tok/s", lambda r: "-" if r["speedup_tps"] is None else f"{r['speedup_tps']:.2f}"),
    "router_share": ("routers", lambda r: f"{r['router_share']:.1%}"),
    "agreement": ("agreement", lambda r: f"{r['agreement']:.1%}"),
    "text_agreement": ("before EOS", lambda r: f"{r['text_agreement']:.1%}"),
    "share_of_oracle": ("of oracle", lambda r: "-" if r["share_of_oracle"] is None else f"{r['share_of_oracle']:.1%}"),
}  # fmt: skip


def print_table(rows: Sequence[dict], console: Console | None = None) -> None:
    """The comparison as a table, with what its columns mean."""
    n, batch, first = rows[0]["n"], rows[0]["batch_size"], rows[0]["method"]
    table = Table(title=f"{n} problems, batch size {batch}")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in rows:
        table.add_row(*(text(row) for _, text in COLUMNS.values()))
    console = console or Console(width=150)
    console.print(table)
    console.print(
        "Generated tokens are those before EOS. NFE: forwards per prompt. Latency: per prompt, at this batch size. "
        f"Speed-ups against {first}. Routers: their time over the backbone's. Agreement: positions equal to the "
        "sequential output, then of those before its EOS. Of oracle: tokens per forward over the oracle's, which has "
        "fixed blocks."
    )


def write_results(out: Path, rows: Sequence[dict], samples: Sequence[Sample]) -> None:
    """`results.json` and `samples.jsonl` in `out`, each whole or absent."""
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(_sample_dict(s)) + "\n" for s in samples)
    for name, text in (("samples.jsonl", lines), ("results.json", json.dumps(list(rows), indent=2) + "\n")):
        write_atomically(out / name, lambda path, text=text: path.write_text(text))


def _sample_dict(sample: Sample) -> dict:
    values = asdict(sample)
    del values["output"]
    return values


def draw_accuracy(path: Path, rows: Sequence[dict]) -> None:
    """Accuracy against tokens per forward, with 95% intervals; a line joins the settings of one method."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    families: dict[str, list[dict]] = {}
    for row in rows:
        families.setdefault(row["method"].partition(":")[0], []).append(row)
    for family in families.values():
        if len(family) > 1:
            points = sorted((r["tokens_per_forward"], r["accuracy"]) for r in family)
            axes.plot(*zip(*points, strict=True), color="0.7", linewidth=1, zorder=0)
    for i, row in enumerate(rows):
        error = [[row["accuracy"] - row["accuracy_low"]], [row["accuracy_high"] - row["accuracy"]]]
        axes.errorbar(
            row["tokens_per_forward"],
            row["accuracy"],
            error,
            fmt="o",
            capsize=3,
            color=f"C{i % 10}",
            label=row["method"],
        )
    axes.set(xlabel="generated tokens per forward", ylabel="accuracy", title=f"{rows[0]['n']} problems, 95% intervals")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small" if len(rows) <= 12 else "xx-small")
    figure.savefig(path, dpi=150)


def draw_commit_steps(path: Path, samples: Sequence[Sample], pieces: dict[str, list[str]]) -> None:
    """For one prompt, the step at which each method committed each token; `pieces` are its tokens as text."""
    rows = len(samples)
    longest = max(max(1, s.tokens) for s in samples)
    figure = Figure(figsize=(max(8, 0.22 * longest), 1.1 * rows + 1.2), layout="constrained")
    axes = figure.subplots()
    grid = np.full((rows, longest), np.nan)
    for i, sample in enumerate(samples):
        steps = np.array(sample.committed_at[:longest], dtype=float)
        steps[steps < 0] = np.nan
        grid[i, : len(steps)] = steps
        grid[i, sample.tokens :] = np.nan
    image = axes.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest")
    for i, sample in enumerate(samples):
        for j in range(min(sample.tokens, longest)):
            piece = pieces[sample.method][j].replace("\n", "\\n").replace("$", r"\$")
            axes.text(j, i, piece, rotation=90, ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(rows), [f"{s.method} ({s.nfe} steps)" for s in samples])
    axes.set(xlabel="position", title=f"step at which each token was committed, {samples[0].id}")
    figure.colorbar(image, ax=axes, label="step", pad=0.01)
    figure.savefig(path, dpi=150)
