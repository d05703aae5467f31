"""Top-k: the k best masked positions of the block by a ranking.

k = 1 by confidence is LLaDA's low-confidence remasking, called "sequential" here: the baseline at 1.0x
(Nie et al., 2025, §2.4; rankings as in DUS, arXiv 2506.19037, §4.3). Ties go to the lowest position.
"""

import torch
from torch import Tensor

from infer.rules import Rule

RANKINGS = ("confidence", "entropy", "margin")


class TopK(Rule):
    def __init__(self, k: int = 1, ranking: str = "confidence"):
        if k < 1:
            raise ValueError(f"k={k}: a step commits at least 1 position")
        if ranking not in RANKINGS:
            raise ValueError(f"ranking={ranking!r} is unknown; allowed: {', '.join(RANKINGS)}")
        self.k, self.ranking = k, ranking
        self.needs = frozenset({ranking})

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        score_BL = -seen.entropy_BL if self.ranking == "entropy" else getattr(seen, f"{self.ranking}_BL")
        score_BL = score_BL.masked_fill(~candidates_BL, -torch.inf)
        order_BL = score_BL.argsort(dim=1, descending=True, stable=True)
        chosen_BL = torch.zeros_like(candidates_BL)
        chosen_BL.scatter_(1, order_BL[:, : self.k], True)
        return chosen_BL & candidates_BL
