"""Filters: what may not be committed, whatever the commit rule says.

`admit` narrows the candidates before the commit rule chooses, `thin` drops some of what it chose. Both leave at least
one position of each row that had any.
"""

import torch
from torch import Tensor

from infer.rules import Rule, order_BL
from infer.when.top_k import check_ranking, ranking_needs, ranking_score


class Filter(Rule):
    """Lets everything through."""

    def admit(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        return candidates_BL

    def thin(self, canvas, seen, chosen_BL: Tensor) -> Tensor:
        return chosen_BL


class DilatedSpacing(Filter):
    """Keeps committed positions apart (DUS, arXiv 2506.19037, §4.4 and B.10).

    Best score first, a position is kept if it is at least g from every one kept before; the rest wait.
    g = max(2, M * g0 // B) with M masked positions left in a block of B; g0 = 0 turns the filter off.
    """

    def __init__(self, g0: int = 8, ranking: str = "confidence"):
        if g0 < 0:
            raise ValueError(f"g0={g0}: need 0 (off) or more positions")
        check_ranking(ranking)
        self.g0, self.ranking = g0, ranking
        self.needs = ranking_needs(ranking) if g0 else frozenset()

    def thin(self, canvas, seen, chosen_BL: Tensor) -> Tensor:
        if self.g0 == 0:
            return chosen_BL
        left_B = canvas.candidates_BL.sum(dim=1)
        gap_B = (left_B * self.g0 // canvas.block_BL.sum(dim=1)).clamp_min(2)
        width = int(chosen_BL.sum(dim=1).max())
        # (B, K) positions, the best first; those beyond a row's own number are not real.
        where_BK = order_BL(ranking_score(self.ranking, canvas, seen), chosen_BL)[:, :width]
        open_BK = chosen_BL.gather(1, where_BK)
        close_BKK = (where_BK[:, :, None] - where_BK[:, None, :]).abs() < gap_B[:, None, None]
        better_KK = torch.ones(width, width, dtype=torch.bool, device=where_BK.device).tril(-1)
        kept_BK = torch.zeros_like(open_BK)
        # A position that no better open one is close to is kept, whatever the order they are looked at in; each pass
        # keeps or drops the best open one of every row at least, so the passes end, and equal the walk one by one.
        while bool(open_BK.any()):
            beaten_BK = (close_BKK & better_KK & open_BK[:, None, :]).any(dim=2)
            new_BK = open_BK & ~beaten_BK
            kept_BK |= new_BK
            open_BK = open_BK & ~new_BK & ~(close_BKK & new_BK[:, None, :]).any(dim=2)
        return torch.zeros_like(chosen_BL).scatter_(1, where_BK, kept_BK)


class NoEosFirst(Filter):
    """EOS predictions are no candidates while a row has any other (EB-Decode, arXiv 2609.16450, §5.1)."""

    def admit(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        others_BL = candidates_BL & (seen.top1_BL != canvas.eos_id)
        return torch.where(others_BL.any(dim=1, keepdim=True), others_BL, candidates_BL)
