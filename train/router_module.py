"""What the Lightning modules of both routers share: optimiser and metrics."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryCalibrationError,
    BinaryPrecision,
    BinaryRecall,
    BinarySpecificity,
)


def router_metrics(prefix: str) -> MetricCollection:
    """Precision, recall and specificity at 0.5, AUROC and calibration error of "this prediction is right"."""
    return MetricCollection(
        {
            "precision": BinaryPrecision(),
            "recall": BinaryRecall(),
            "specificity": BinarySpecificity(),
            "auroc": BinaryAUROC(thresholds=501),
            "calibration_error": BinaryCalibrationError(n_bins=15),
        },
        prefix=prefix,
    )


class RouterModule(L.LightningModule):
    """Subclasses give `scores(batch) -> (loss, logit_BK, right_BK, valid_BK)`.

    The learning rate rises over `warmup` steps and falls along a cosine to zero at the end of `horizon` epochs.
    """

    def __init__(self, router: torch.nn.Module, *, lr: float, weight_decay: float, warmup: int, horizon: int):
        super().__init__()
        self.router = router
        self.lr, self.weight_decay, self.warmup, self.horizon = lr, weight_decay, warmup, horizon
        self.metrics = router_metrics("val/")

    def scores(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def training_step(self, batch, _):
        loss, _, _, valid_BK = self.scores(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=max(1, int(valid_BK.sum())))
        return loss

    def validation_step(self, batch, _):
        loss, logit_BK, right_BK, valid_BK = self.scores(batch)
        self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=max(1, int(valid_BK.sum())))
        self.metrics.update(logit_BK[valid_BK].sigmoid(), right_BK[valid_BK].long())

    def on_validation_epoch_end(self):
        values = self.metrics.compute()
        values["val/fpr"] = 1 - values.pop("val/specificity")
        self.log_dict(values, sync_dist=True)  # equal on all ranks already; without it Lightning warns
        self.metrics.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.router.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        # Counted in epochs, not in what is left to run: a run that stops early and goes on keeps its schedule.
        _ = self.trainer.estimated_stepping_batches  # makes the trainer count its batches
        total = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches * self.horizon

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(1, self.warmup))
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
