"""KLASS: what the denoiser is sure of and has stopped changing its mind about.

Source: Kim et al. (2025), "KLASS: KL-Guided Fast Inference in Masked Diffusion Models" (arXiv 2511.05664).

    steady: the last n KL divergences KL(p_now || p_before) of the position are all < epsilon
    commit the steady candidates with c_i >= tau; none -> the k best by confidence

Defaults: tau = 0.9, epsilon = 0.01 nats, n = 2, k = 1. Every masked position is followed from the row's first step on,
its block open or not, so a position may be steady as its block opens. [reading] that history alone decides, where the
authors' code also waits for n - 1 steps in each block; a position with fewer than n divergences is not steady.
"""

import torch
from torch import Tensor

from infer.rules import Rule, order_BL, take
from infer.when.threshold import check_probability


class Klass(Rule):
    needs = frozenset({"confidence"})

    def __init__(self, tau: float = 0.9, epsilon: float = 0.01, steps: int = 2, k: int = 1):
        if epsilon <= 0:
            raise ValueError(f"epsilon={epsilon}: need more than 0 nats")
        if steps < 1:
            raise ValueError(f"steps={steps}: need at least 1 step to be steady for")
        if k < 1:
            raise ValueError(f"k={k}: a step commits at least 1 position")
        self.tau, self.epsilon, self.k = check_probability("tau", tau), epsilon, k
        self.kl_steps = steps

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        steady_BL = (seen.kl_BLH < self.epsilon).all(dim=2)
        ready_BL = candidates_BL & steady_BL & (seen.confidence_BL >= self.tau)
        best_BL = take(order_BL(seen.confidence_BL, candidates_BL), self.k, candidates_BL)
        return torch.where(ready_BL.any(dim=1, keepdim=True), ready_BL, best_BL)
