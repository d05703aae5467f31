"""Factor: the most confident candidates, as many as their confidence carries.

Source: Fast-dLLM (Wu et al., 2025), its factor-based parallel decoding.

    sort by c descending; commit the first n, n the largest with (n + 1)(1 - c_(n)) < f; at least one

Default: f = 1.
"""

import torch
from torch import Tensor

from infer.rules import Rule, order_BL, take


class Factor(Rule):
    needs = frozenset({"confidence"})

    def __init__(self, factor: float = 1.0):
        if factor <= 0:
            raise ValueError(f"factor={factor}: need more than 0")
        self.factor = factor

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        ordered_BL = order_BL(seen.confidence_BL, candidates_BL)
        confidence_BL = seen.confidence_BL.gather(1, ordered_BL).double()
        n_L = torch.arange(1, ordered_BL.shape[1] + 1, device=ordered_BL.device)
        holds_BL = ((n_L + 1) * (1 - confidence_BL) < self.factor) & candidates_BL.gather(1, ordered_BL)
        # The largest n that holds, whether or not every smaller one does.
        return take(ordered_BL, (holds_BL * n_L).amax(dim=1), candidates_BL)
