"""Threshold tables for people: a CSV beside the run, and W&B objects where that logger is on."""

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightning.pytorch.loggers import Logger, WandbLogger

from routers.threshold import ThresholdPoint


def log_thresholds(loggers: Sequence[Logger], table: Sequence[ThresholdPoint], out: Path) -> None:
    """Writes `thresholds.csv` and, for W&B, the table and the curve of recall against false-positive rate."""
    columns = list(asdict(table[0]))
    rows = [list(asdict(point).values()) for point in table]
    with open(out / "thresholds.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            objects = wandb.Table(columns=columns, data=rows)
            curve = wandb.plot.line(objects, "fpr", "recall", title="recall against false-positive rate")
            logger.experiment.log({"thresholds": objects, "recall_fpr_curve": curve})
