"""Trains LPS, the router that finds predictions ready to be committed, and exports it with its threshold.

python train/lps.py trace.limit=512 out=runs/lps
python train/lps.py method=sequential out=runs/lps_fixed
"""

from dataclasses import asdict, replace
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from routers.config import LPSConfig
from routers.lps import LPS
from routers.threshold import best_threshold, recall_within, threshold_table
from train.lps_module import COLUMNS, LPSModule
from train.reporting import log_thresholds
from train.router_run import fit, is_exported, origin_of, scores_of, test_metrics, traces_for, training_record
from train.trace_data import TraceData


@hydra.main(config_path="../conf", config_name="train_lps", version_base="1.3")
def main(cfg: DictConfig) -> None:
    backbone = instantiate(cfg.backbone)
    if cfg.reuse and is_exported(cfg, backbone):
        print(f"{cfg.out}/export was trained with this very config already")
        return
    store = traces_for(cfg, backbone)
    L.seed_everything(cfg.seed, verbose=False)  # here, so that making traces has no say in the weights
    router = LPS(LPSConfig(origin_of(store), **{**cfg.model, "features": tuple(cfg.model.features)}))
    data = TraceData(store, COLUMNS, batch_size=cfg.batch_size, limit=cfg.trace.limit, seed=cfg.seed)
    fitted = fit(cfg, LPSModule(router, **cfg.loss, **cfg.optim), data)
    if fitted.trainer.is_global_zero:
        score_N, right_N, _ = scores_of(fitted.module, data.val_dataloader())
        table = threshold_table(score_N, right_N)
        log_thresholds(fitted.loggers, table, Path(cfg.out))
        chosen = best_threshold(table, cfg.fpr_budget)
        score_N, right_N, loss = scores_of(fitted.module, data.test_dataloader())
        metrics = test_metrics(fitted, score_N, right_N, loss)
        (at,) = threshold_table(score_N, right_N, grid=(chosen.threshold, chosen.threshold, 1))
        for part, point in (("val", chosen), ("test", at)):
            metrics |= {f"{part}/{k}_at_threshold": v for k, v in asdict(point).items() if k != "threshold"}
        # What the router adds: the recall of a threshold on the confidence alone at no more false positives.
        confidence_N = torch.cat([b.lists["confidence"][b.valid_BK] for b in data.test_dataloader()])
        metrics["test/confidence_recall_at_that_fpr"] = recall_within(confidence_N, right_N, at.fpr)
        training = training_record(cfg, backbone)
        router.config = replace(router.config, threshold=chosen.threshold, metrics=metrics, training=training)
        folder = router.save_pretrained(Path(cfg.out) / "export")
        figures = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        print(f"exported {folder}, threshold {chosen.threshold:.4f}: {figures}")


if __name__ == "__main__":
    main()
