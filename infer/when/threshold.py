"""Confidence threshold: every candidate with c_i >= tau, else the best one.

Source: Fast-dLLM (Wu et al., 2025), its parallel decoding; DUS calls it the CB-Sampler. Default tau = 0.9.
"""

from torch import Tensor

from infer.rules import Rule, or_best


def check_probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: need a probability in [0, 1]")
    return value


class Threshold(Rule):
    needs = frozenset({"confidence"})

    def __init__(self, tau: float = 0.9):
        self.tau = check_probability("tau", tau)

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        sure_BL = candidates_BL & (seen.confidence_BL >= self.tau)
        return or_best(sure_BL, seen.confidence_BL, candidates_BL)
