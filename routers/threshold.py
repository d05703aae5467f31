"""Threshold search under a false-positive budget (EB-Decode, arXiv 2609.16450, App. D.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

GRID = (0.8, 0.9999, 250)


@dataclass(frozen=True)
class ThresholdPoint:
    """Rates at one threshold: `recall` of right predictions, `fpr` of wrong ones, `precision` of what is accepted."""

    threshold: float
    recall: float
    fpr: float
    precision: float


def threshold_table(score_N: Tensor, right_N: Tensor, grid: tuple[float, float, int] = GRID) -> list[ThresholdPoint]:
    """One point a grid threshold; a position is accepted at score >= threshold. `score_N` in [0, 1], `right_N` bool."""
    score_N, order_N = score_N.double().sort()
    right_N = right_N[order_N]
    grid_G = torch.linspace(grid[0], grid[1], grid[2], dtype=torch.double)
    first_G = torch.searchsorted(score_N, grid_G)
    rights_before = torch.cat([torch.zeros(1, dtype=torch.long), right_N.long().cumsum(0)])
    positives, total = int(rights_before[-1]), len(score_N)
    points = []
    for threshold, first in zip(grid_G.tolist(), first_G.tolist(), strict=True):
        true_positives = positives - int(rights_before[first])
        accepted = total - first
        false_positives = accepted - true_positives
        points.append(
            ThresholdPoint(
                threshold=threshold,
                recall=true_positives / max(1, positives),
                fpr=false_positives / max(1, total - positives),
                precision=true_positives / max(1, accepted),
            )
        )
    return points


def best_threshold(points: list[ThresholdPoint], budget: float) -> ThresholdPoint:
    """The point of largest recall with FPR at most `budget`; among equals the highest threshold.

    Raises ValueError with the best FPR reached where no point meets the budget.
    """
    allowed = [p for p in points if p.fpr <= budget]
    if not allowed:
        best = min(points, key=lambda p: p.fpr)
        raise ValueError(
            f"fpr_budget={budget}: no threshold of the grid meets it; the best is FPR {best.fpr:.4f} at threshold "
            f"{best.threshold:.4f}. Allow more, or train longer"
        )
    return max(allowed, key=lambda p: (p.recall, p.threshold))


def recall_within(score_N: Tensor, right_N: Tensor, fpr: float) -> float:
    """Largest recall of any threshold on `score_N` whose false-positive rate is at most `fpr`; `right_N` bool."""
    score_N, order_N = score_N.double().sort(descending=True)
    right_N = right_N[order_N]
    recall_N = right_N.cumsum(0).double() / right_N.sum().clamp_min(1)
    fpr_N = (~right_N).cumsum(0).double() / (~right_N).sum().clamp_min(1)
    # A threshold takes all positions of one score or none of them.
    last_N = torch.cat([score_N[1:] != score_N[:-1], torch.ones(1, dtype=torch.bool)])
    allowed_N = recall_N[last_N & (fpr_N <= fpr)]
    return float(allowed_N.max()) if len(allowed_N) else 0.0
