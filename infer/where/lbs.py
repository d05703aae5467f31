"""LBS, learnable block size: a router picks the positions of the next block (EB-Decode, arXiv 2609.16450, §5.1).

    pi_i = sigmoid(LBS(h_i, top-1 token, position)) over all masked positions
    1. selected: pi_i >= the router's threshold, 0.5, where the training loss has its optimum [reading: the paper names
       none]
    2. EOS predictions are dropped, which would end the text early
    3. kept while the gap to the previous selected position is at most g_max, cut at the first larger gap
    4. fewer than l_min left: the first `fallback` masked positions instead

Defaults: g_max 5, l_min 8 (LLaDA-1.5: 16), fallback 32 (§5.1, App. F). The scores come from the forward that is also
the first step of the block: no extra NFE.
"""

from pathlib import Path

import torch
from torch import Tensor

from backbones.packing import pack_left, positions
from infer.rules import Rule
from routers.checkpoint import check_fits
from routers.lbs import LBS


class Lbs(Rule):
    needs = frozenset({"entropy"})
    has_router = True
    contiguous = False

    def __init__(
        self, router: str | Path | LBS, g_max: int = 5, l_min: int = 8, fallback: int = 32, allow_transfer: bool = False
    ):
        if g_max < 1 or l_min < 1 or fallback < 1:
            raise ValueError(f"g_max={g_max}, l_min={l_min}, fallback={fallback}: each must be at least 1")
        self.router = router if isinstance(router, LBS) else LBS.from_pretrained(router)
        self.g_max, self.l_min, self.fallback = g_max, l_min, fallback
        self.threshold, self.allow_transfer = self.router.config.threshold, allow_transfer

    def bind(self, backbone, gen_length: int) -> None:
        check_fits(self.router.config, backbone, gen_length, self.allow_transfer)
        self.router.to(backbone.device).eval()
        self.router.cache_embedding(backbone.embedding)

    @torch.no_grad()
    def form(self, canvas, seen, rows_B: Tensor) -> Tensor:
        block_BL = torch.zeros_like(canvas.masked_BL)
        count, width = None, None
        if seen.known is not None:  # every mask of a row whose block is formed was asked for
            asked = [n for n, forming in zip(seen.known.asked, seen.known.forming, strict=True) if forming]
            count, width = len(asked), max(asked)
        (rows_R,) = positions(rows_B, count)
        masked_RL, top1_RL = canvas.masked_BL[rows_R], seen.top1_BL[rows_R]
        where_RK, valid_RK = pack_left(masked_RL, width)
        entropy_RK = seen.normalised_entropy_BL[rows_R].gather(1, where_RK)
        token_RK = top1_RL.gather(1, where_RK)
        pi_RK = self.router(entropy_RK, token_RK, where_RK, valid_RK).sigmoid()
        include_RK = (pi_RK >= self.threshold) & (token_RK != canvas.eos_id)
        selected_RL = torch.zeros_like(masked_RL).scatter_(1, where_RK, include_RK & valid_RK)
        chosen_RL = cut_at_gap(selected_RL, self.g_max)
        short_R1 = chosen_RL.sum(dim=1, keepdim=True) < self.l_min
        first_RL = masked_RL & (masked_RL.cumsum(dim=1) <= self.fallback)
        block_BL[rows_R] = torch.where(short_R1, first_RL, chosen_RL)
        return block_BL


def cut_at_gap(selected_BL: Tensor, g_max: int) -> Tensor:
    """Selected positions (B, L) bool up to the first one further than `g_max` from the selected one before it."""
    where_L = torch.arange(selected_BL.shape[1], device=selected_BL.device)
    nowhere = selected_BL.shape[1]
    # Position of the last selected one at or before each position; before the first one there is none, and no gap.
    last_BL = torch.where(selected_BL, where_L, -nowhere).cummax(dim=1).values
    previous_BL = torch.nn.functional.pad(last_BL[:, :-1], (1, 0), value=-nowhere)
    too_far_BL = selected_BL & (previous_BL >= 0) & (where_L - previous_BL > g_max)
    return selected_BL & (too_far_BL.cumsum(dim=1) == 0)
