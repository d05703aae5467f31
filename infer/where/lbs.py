"""LBS, learnable block size: a router picks the positions of the next block (EB-Decode, arXiv 2609.16450, §5.1).

    pi_i = sigmoid(LBS(h_i, top-1 token, position)) over all masked positions
    1. selected: pi_i >= 0.5, where the training loss has its optimum [reading: the paper names no threshold]
    2. EOS predictions are dropped, which would end the text early
    3. kept while the gap to the previous selected position is at most g_max, cut at the first larger gap; the first
       one's gap is measured from the first masked position [reading: a block far from what is known is too sparse]
    4. fewer than l_min left: the first `fallback` masked positions instead

Defaults: g_max 5, l_min 8 (LLaDA-1.5: 16), fallback 32 (§5.1, App. F). The scores come from the forward that is also
the first step of the block: no extra NFE.
"""

from pathlib import Path

import torch
from torch import Tensor

from infer.rules import Rule, pack_left
from routers.checkpoint import check_fits
from routers.lbs import LBS


class Lbs(Rule):
    needs = frozenset({"entropy"})
    has_router = True

    def __init__(
        self, router: str | Path | LBS, g_max: int = 5, l_min: int = 8, fallback: int = 32, allow_transfer: bool = False
    ):
        if g_max < 1 or l_min < 1 or fallback < 1:
            raise ValueError(f"g_max={g_max}, l_min={l_min}, fallback={fallback}: each must be at least 1")
        self.router = router if isinstance(router, LBS) else LBS.from_pretrained(router)
        self.g_max, self.l_min, self.fallback = g_max, l_min, fallback
        self.allow_transfer = allow_transfer

    def bind(self, backbone, gen_length: int) -> None:
        check_fits(self.router.config, backbone, gen_length, self.allow_transfer)
        self.router.to(backbone.device).eval()
        self.router.cache_embedding(backbone.embedding)

    @torch.no_grad()
    def form(self, canvas, seen, rows_B: Tensor) -> Tensor:
        block_BL = torch.zeros_like(canvas.masked_BL)
        rows_R = rows_B.nonzero()[:, 0]
        masked_RL, top1_RL = canvas.masked_BL[rows_R], seen.top1_BL[rows_R]
        where_RK, valid_RK = pack_left(masked_RL)
        entropy_RK = seen.normalised_entropy_BL[rows_R].gather(1, where_RK)
        token_RK = top1_RL.gather(1, where_RK)
        include_RK = (self.router(entropy_RK, token_RK, where_RK, valid_RK) >= 0) & (token_RK != canvas.eos_id)
        selected_RL = torch.zeros_like(masked_RL).scatter_(1, where_RK, include_RK & valid_RK)
        chosen_RL = cut_at_gap(selected_RL, masked_RL, self.g_max)
        short_R1 = chosen_RL.sum(dim=1, keepdim=True) < self.l_min
        first_RL = masked_RL & (masked_RL.cumsum(dim=1) <= self.fallback)
        block_BL[rows_R] = torch.where(short_R1, first_RL, chosen_RL)
        return block_BL


def cut_at_gap(selected_BL: Tensor, masked_BL: Tensor, g_max: int) -> Tensor:
    """Selected positions up to the first one further than `g_max` from the selected one before it.

    The first one is measured from the position before the first mask.
    """
    where_L = torch.arange(selected_BL.shape[1], device=selected_BL.device)
    origin_B1 = masked_BL.float().argmax(dim=1, keepdim=True) - 1
    last_BL = torch.where(selected_BL, where_L, origin_B1).cummax(dim=1).values
    previous_BL = torch.cat([origin_B1, last_BL[:, :-1]], dim=1)
    too_far_BL = selected_BL & (where_L - previous_BL > g_max)
    return selected_BL & (too_far_BL.cumsum(dim=1) == 0)
