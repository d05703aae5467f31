"""The Lightning module of LPS."""

import math

from torch import Tensor

from routers.lps import LPS, Features, lps_loss
from train.router_module import RouterModule
from train.trace_data import RowBatch

COLUMNS = ("block_size", "rank", "confidence", "second", "entropy", "right")


def features_of(batch: RowBatch, vocab_size: int) -> Features:
    """LPS inputs from kind=replay rows; the same function of the same statistics as when decoding."""
    lists = batch.lists
    return Features.of(
        rank=lists["rank"].long(),
        block_size=batch.scalars["block_size"],
        confidence=lists["confidence"],
        second=lists["second"],
        entropy=lists["entropy"] / math.log(vocab_size),
        valid=batch.valid_BK,
    )


class LPSModule(RouterModule):
    router: LPS

    def __init__(self, router: LPS, *, negative_weight: float, **optim):
        super().__init__(router, **optim)
        self.negative_weight = negative_weight

    def scores(self, batch: RowBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logit_BK = self.router(features_of(batch, self.router.config.origin.vocab_size))
        right_BK = batch.lists["right"]
        loss = lps_loss(logit_BK, right_BK, batch.valid_BK, negative_weight=self.negative_weight)
        return loss, logit_BK, right_BK, batch.valid_BK
