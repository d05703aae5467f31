"""Trains LPS, the router that finds predictions ready to be committed, and exports it with its threshold.

python train/lps.py trace.limit=512 out=runs/lps
python train/lps.py method=sequential out=runs/lps_fixed
"""

from dataclasses import asdict, replace
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from routers.config import LPSConfig
from routers.lps import LPS
from routers.threshold import best_threshold, threshold_table
from train.lps_module import COLUMNS, LPSModule
from train.reporting import log_thresholds
from train.router_run import fit, is_exported, origin_of, scores_of, test_metrics, traces_for, training_record
from train.trace_data import TraceData


@hydra.main(config_path="../conf", config_name="train_lps", version_base="1.3")
def main(cfg: DictConfig) -> None:
    if cfg.reuse and is_exported(cfg):
        print(f"{cfg.out}/export was trained with this very config already")
        return
    L.seed_everything(cfg.seed, verbose=False)
    store = traces_for(cfg, instantiate(cfg.backbone))
    router = LPS(LPSConfig(origin_of(store), **{**cfg.model, "features": tuple(cfg.model.features)}))
    data = TraceData(store, COLUMNS, batch_size=cfg.batch_size, limit=cfg.trace.limit, seed=cfg.seed)
    fitted = fit(cfg, LPSModule(router, **cfg.loss, **cfg.optim), data)
    metrics = test_metrics(fitted, data)
    if fitted.trainer.is_global_zero:
        table = threshold_table(*scores_of(fitted.module, data.val_dataloader()))
        log_thresholds(fitted.loggers, table, Path(cfg.out))
        chosen = best_threshold(table, cfg.fpr_budget)
        at = threshold_table(*scores_of(fitted.module, data.test_dataloader()), grid=(chosen.threshold,) * 2 + (1,))[0]
        metrics |= {f"val/{k}_at_threshold": v for k, v in asdict(chosen).items() if k != "threshold"}
        metrics |= {f"test/{k}_at_threshold": v for k, v in asdict(at).items() if k != "threshold"}
        router.config = replace(
            router.config, threshold=chosen.threshold, metrics=metrics, training=training_record(cfg)
        )
        folder = router.cpu().save_pretrained(Path(cfg.out) / "export")
        print(
            f"exported {folder}, threshold {chosen.threshold:.4f}: "
            + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        )


if __name__ == "__main__":
    main()
