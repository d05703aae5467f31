"""The Lightning module of LBS."""

import math

from torch import Tensor

from routers.lbs import LBS, lbs_loss
from train.router_module import RouterModule
from train.trace_data import RowBatch

COLUMNS = ("position", "top1", "entropy", "loss", "right")


class LBSModule(RouterModule):
    """Trains an LBS that has its backbone's embedding attached, on kind=masked rows.

    Positions predicted as EOS are attended to but have no loss and no part in the metrics: decoding never selects them
    [reading: the paper drops them at inference and is silent on training], and they are so many and so easy that a
    router trained on them learns to tell EOS from text and includes no text at all.
    """

    router: LBS

    def __init__(self, router: LBS, *, eos_id: int, wrong_weight: float, reward: float, cap: float, **optim):
        super().__init__(router, **optim)
        self.eos_id, self.loss = eos_id, {"wrong_weight": wrong_weight, "reward": reward, "cap": cap}

    def scores(self, batch: RowBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lists = batch.lists
        entropy_BK = lists["entropy"] / math.log(self.router.config.origin.vocab_size)
        logit_BK = self.router(entropy_BK, lists["top1"].long(), lists["position"].long(), batch.valid_BK)
        counted_BK = batch.valid_BK & (lists["top1"] != self.eos_id)
        loss = lbs_loss(logit_BK, lists["loss"], lists["right"], counted_BK, **self.loss)
        return loss, logit_BK, lists["right"], counted_BK
