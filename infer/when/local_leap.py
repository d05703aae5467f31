"""LocalLeap: confident anchors carry their neighbours.

Source: LocalLeap, its Algorithm 1 (local determinism: predictions near a committed confident token seldom change).

    anchors A = {c_i >= kappa}; neighbours N = {j not in A : some a in A with |j - a| <= W, c_j >= tau}
    commit A and N; no anchor -> the best candidate

Defaults: kappa = 0.9, W = 4, tau = 0.75 (Dream: tau = 0.8). Distances are positions, and anchors are candidates of
the active block: tokens committed in earlier steps are none.
"""

import warnings

from torch import Tensor
from torch.nn.functional import max_pool1d

from infer.rules import Rule, or_best
from infer.when.threshold import check_probability


class LocalLeap(Rule):
    needs = frozenset({"confidence"})

    def __init__(self, kappa: float = 0.9, window: int = 4, tau: float = 0.75):
        self.kappa, self.tau = check_probability("kappa", kappa), check_probability("tau", tau)
        if window < 0:
            raise ValueError(f"window={window}: need 0 or more positions")
        if kappa < tau:
            warnings.warn(
                f"kappa={kappa} is below tau={tau}: every neighbour is an anchor itself, and local_leap is threshold "
                f"at {kappa}",
                stacklevel=2,
            )
        self.window = window

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        anchor_BL = candidates_BL & (seen.confidence_BL >= self.kappa)
        width = 2 * self.window + 1
        near_BL = max_pool1d(anchor_BL.float()[:, None], width, stride=1, padding=self.window)[:, 0] > 0
        leap_BL = candidates_BL & near_BL & (seen.confidence_BL >= self.tau)
        return or_best(anchor_BL | leap_BL, seen.confidence_BL, candidates_BL)
