"""The Lightning module of LBS."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from routers.lbs import LBS, lbs_loss
from train.router_module import RouterModule
from train.trace_data import RowBatch

COLUMNS = ("position", "top1", "entropy", "loss", "right")


def counted(batch: RowBatch, eos_id: int) -> Tensor:
    """Positions (B, K) bool that have a loss."""
    return batch.valid_BK & (batch.lists["top1"] != eos_id)


def costs(batches: Iterable[RowBatch], eos_id: int, wrong_weight: float) -> Tensor:
    """w_i * l_i (N,) of all positions that have a loss."""
    parts = []
    for batch in batches:
        weight_BK = torch.where(batch.lists["right"], 1.0, wrong_weight)
        parts.append((weight_BK * batch.lists["loss"])[counted(batch, eos_id)])
    return torch.cat(parts)


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
        counted_BK = counted(batch, self.eos_id)
        loss = lbs_loss(logit_BK, lists["loss"], lists["right"], counted_BK, **self.loss)
        return loss, logit_BK, lists["right"], counted_BK
