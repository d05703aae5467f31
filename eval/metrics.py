"""The figures of a comparison."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from infer.canvas import text_length


@dataclass(frozen=True)
class Sample:
    """One completion by one method. The first eight fields are what `samples.jsonl` is promised to hold.

    `tokens` are generated tokens: those before EOS. `committed_at` has a step for every position, -1 where the stop
    rule filled it. `template` is the problem's family. `output` is the whole generation region.
    """

    method: str
    id: str
    prompt: str
    completion: str
    correct: bool
    nfe: int
    tokens: int
    latency_ms: float
    committed_at: list[int]
    template: str
    output: list[int]


@dataclass(frozen=True)
class Timing:
    """Seconds of one method over all prompts, warm-up left out."""

    wall: float
    backbone: float
    observe: float
    router: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding must not push a bound past the proportion itself.
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))


def agreement(samples: Sequence[Sample], reference: dict[str, list[int]]) -> float:
    """Share of positions equal to the reference output, over whole generation regions."""
    return fmean(float(np.mean(np.array(s.output) == np.array(reference[s.id]))) for s in samples)


def text_agreement(samples: Sequence[Sample], reference: dict[str, list[int]], eos_id: int) -> float:
    """As `agreement`, over the reference's positions before its EOS, as the tail agrees for free."""
    equal = []
    for sample in samples:
        wanted = reference[sample.id]
        length = text_length(wanted, eos_id)
        equal += [a == b for a, b in zip(sample.output[:length], wanted[:length], strict=True)]
    return fmean(equal) if equal else 1.0


def result_row(
    method: str,
    samples: Sequence[Sample],
    timing: Timing,
    batch_size: int,
    first: dict | None,
    reference: dict[str, list[int]],
    oracle_tokens_per_forward: float | None,
    eos_id: int,
) -> dict:
    """One row of `results.json`. `first` is the row that speed-ups are taken against, None for that row itself.

    `router_share` is the time inside rules that hold a router over the backbone's; the statistics that routers read
    are in `observe_share`, which is there for every method. A ratio to nothing is None.
    """
    n, correct = len(samples), sum(s.correct for s in samples)
    low, high = wilson(correct, n)
    tokens, nfe = sum(s.tokens for s in samples), sum(s.nfe for s in samples)
    row = {
        "method": method,
        "n": n,
        "accuracy": correct / n,
        "accuracy_low": low,
        "accuracy_high": high,
        "nfe": nfe / n,
        "tokens_per_forward": tokens / nfe,
        "tokens_per_second": tokens / timing.wall,
        "latency_ms": fmean(s.latency_ms for s in samples),
        "batch_size": batch_size,
        "router_share": timing.router / timing.backbone,
        "observe_share": timing.observe / timing.backbone,
        "agreement": agreement(samples, reference),
        "text_agreement": text_agreement(samples, reference, eos_id),
        "share_of_oracle": None if not oracle_tokens_per_forward else tokens / nfe / oracle_tokens_per_forward,
        "tokens": tokens / n,
        "seconds": timing.wall,
    }
    base = first or row
    row["speedup_nfe"] = base["nfe"] / row["nfe"]
    first_speed = base["tokens_per_second"]
    row["speedup_tps"] = row["tokens_per_second"] / first_speed if first_speed else None
    return row
