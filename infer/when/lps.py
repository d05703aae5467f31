"""LPS, learnable parallel sampling: a router finds predictions that will not change.

Source: EB-Decode, arXiv 2609.16450, §5.2.

    commit i if c_i >= tau or sigmoid(LPS_i) >= tau_psi, else the best candidate

Defaults: tau = 0.9; tau_psi is the router's own, found on its validation trajectories (published: 0.89 / 0.90 / 0.87).
"""

from pathlib import Path

import torch
from torch import Tensor

from backbones.packing import pack_left
from infer.rules import Rule, or_best
from infer.when.threshold import check_probability
from routers.checkpoint import check_fits
from routers.lps import LPS, STATISTICS, Features


class Lps(Rule):
    needs = frozenset(STATISTICS)
    has_router = True

    def __init__(
        self, router: str | Path | LPS, tau: float = 0.9, tau_psi: float | None = None, allow_transfer: bool = False
    ):
        self.tau = check_probability("tau", tau)
        self.router = router if isinstance(router, LPS) else LPS.from_pretrained(router)
        self.tau_psi = check_probability("tau_psi", self.router.config.threshold if tau_psi is None else tau_psi)
        self.allow_transfer = allow_transfer

    def bind(self, backbone, gen_length: int) -> None:
        check_fits(self.router.config, backbone, gen_length, self.allow_transfer)
        self.router.to(backbone.device).eval()

    @torch.no_grad()
    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        order_BK, valid_BK = pack_left(candidates_BL, None if seen.known is None else seen.known.width(candidates_BL))
        rank_BL = (canvas.block_BL.cumsum(dim=1) - 1).clamp_min(0)  # padding columns may lie before the block
        features = Features.of(
            rank=rank_BL.gather(1, order_BK),
            block_size=canvas.block_BL.sum(dim=1),
            confidence=seen.confidence_BL.gather(1, order_BK),
            second=seen.second_BL.gather(1, order_BK),
            entropy=seen.normalised_entropy_BL.gather(1, order_BK),
            valid=valid_BK,
        )
        score_BK = self.router(features).sigmoid()
        early_BL = torch.zeros_like(candidates_BL).scatter_(1, order_BK, (score_BK >= self.tau_psi) & valid_BK)
        sure_BL = candidates_BL & (seen.confidence_BL >= self.tau)
        return or_best(early_BL | sure_BL, seen.confidence_BL, candidates_BL)
