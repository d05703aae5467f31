"""Trains LBS, the router that picks the next block, and exports it.

python train/lbs.py trace.limit=512 out=runs/lbs
python train/lbs.py model.inputs=entropy logger=wandb trainer.max_epochs=5
"""

from dataclasses import replace
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from routers.config import LBSConfig
from routers.lbs import LBS, balanced_cap
from train.lbs_module import COLUMNS, LBSModule, costs
from train.router_run import fit, is_exported, origin_of, scores_of, test_metrics, traces_for, training_record
from train.trace_data import TraceData


@hydra.main(config_path="../conf", config_name="train_lbs", version_base="1.3")
def main(cfg: DictConfig) -> None:
    backbone = instantiate(cfg.backbone)
    if cfg.reuse and is_exported(cfg, backbone):
        print(f"{cfg.out}/export was trained with this very config already")
        return
    store = traces_for(cfg, backbone)
    L.seed_everything(cfg.seed, verbose=False)  # here, so that making traces has no say in the weights
    router = LBS(LBSConfig(origin_of(store), embedding_size=backbone.embedding.shape[1], **cfg.model))
    router.attach_embedding(backbone.embedding)
    data = TraceData(store, COLUMNS, batch_size=cfg.batch_size, limit=cfg.trace.limit, seed=cfg.seed)
    loss = dict(cfg.loss)
    if loss["cap"] == "auto":
        data.setup()
        loss["cap"] = balanced_cap(
            costs(data.train_dataloader(), backbone.eos_id, loss["wrong_weight"]), loss["reward"]
        )
        print(f"loss.cap={loss['cap']:.3f}, at which the training positions cost loss.reward on average")
    fitted = fit(cfg, LBSModule(router, eos_id=backbone.eos_id, **loss, **cfg.optim), data)
    if fitted.trainer.is_global_zero:
        metrics = test_metrics(fitted, *scores_of(fitted.module, data.test_dataloader()))
        if metrics["test/recall"] == 0:
            print("WARNING: this router includes no position; raise loss.reward or lower loss.cap")
        if metrics["test/fpr"] == 1:
            print("WARNING: this router includes every position; lower loss.reward or raise loss.cap")
        router.config = replace(router.config, metrics=metrics, training=training_record(cfg, backbone))
        folder = router.save_pretrained(Path(cfg.out) / "export")
        print(f"exported {folder}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))


if __name__ == "__main__":
    main()
