"""The Lightning module of LBS."""

import math

from torch import Tensor

from routers.lbs import LBS, lbs_loss
from train.router_module import RouterModule
from train.trace_data import RowBatch

COLUMNS = ("position", "top1", "entropy", "loss", "right")


class LBSModule(RouterModule):
    """Trains an LBS that has its backbone's embedding attached, on kind=masked rows."""

    router: LBS

    def __init__(self, router: LBS, *, wrong_weight: float, reward: float, **optim):
        super().__init__(router, **optim)
        self.wrong_weight, self.reward = wrong_weight, reward

    def scores(self, batch: RowBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lists = batch.lists
        entropy_BK = lists["entropy"] / math.log(self.router.config.origin.vocab_size)
        logit_BK = self.router(entropy_BK, lists["top1"].long(), lists["position"].long(), batch.valid_BK)
        loss = lbs_loss(
            logit_BK, lists["loss"], lists["right"], batch.valid_BK, wrong_weight=self.wrong_weight, reward=self.reward
        )
        return loss, logit_BK, lists["right"], batch.valid_BK
