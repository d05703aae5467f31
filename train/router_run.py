"""The steps that `train/lbs.py` and `train/lps.py` share: traces, fit, best checkpoint, scores."""

import json
import logging
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from backbones.base import Backbone
from routers.config import Origin
from trace_gen.job import make_spec, make_traces
from trace_gen.store import MANIFEST, TraceStore
from train.hardware import resolve_precision
from train.router_module import RouterModule, router_metrics
from train.trace_data import TraceData


def traces_for(cfg: DictConfig, backbone: Backbone) -> TraceStore:
    """The traces that `cfg.trace` asks for; made first where missing, or an error with the command that makes them."""
    if not cfg.trace.generate:
        folder = Path(cfg.trace.out)
        there = (folder / MANIFEST).exists()
        store = TraceStore.create_or_open(folder, make_spec(cfg, backbone), "") if there else None
        if store is None or store.pending(cfg.trace.limit):
            overrides = [o for o in HydraConfig.get().overrides.task if o.split("=")[0].split(".")[0] in _TRACE_GROUPS]
            command = shlex.join(
                ["python", "trace_gen/generate.py", f"trace={cfg.trace.kind}", f"trace.limit={cfg.trace.limit}"]
                + [o for o in overrides if not o.startswith(("trace.generate", "trace.limit"))]
            )
            raise ValueError(
                f"trace.generate=false and the traces in {folder} are missing or too few; make them: {command}"
            )
        return store
    return make_traces(cfg, backbone, instantiate(cfg.task))


_TRACE_GROUPS = ("backbone", "task", "decode", "router", "method", "trace")


def origin_of(store: TraceStore) -> Origin:
    """What a router trained on `store` belongs to."""
    backbone, decode = store.spec["backbone"], store.spec["decode"]
    return Origin(
        backbone=backbone["name"],
        fingerprint=backbone["fingerprint"],
        vocab_size=backbone["vocab_size"],
        mask_id=backbone["mask_id"],
        gen_length=decode["gen_length"],
        block_length=decode["block_length"],
        vocabulary=backbone["tokenizer"],
    )


def training_record(cfg: DictConfig, backbone: Backbone) -> dict[str, Any]:
    """What decides a router: the training's settings, and the spec of its traces with hashes in place of paths."""
    record = OmegaConf.to_container(cfg, resolve=True)
    kept = ("seed", "patience", "batch_size", "fpr_budget", "model", "loss", "optim", "trainer")
    traces = {"limit": cfg.trace.limit, **make_spec(cfg, backbone)}
    return {"traces": traces, **{name: record[name] for name in kept if name in record}}


def is_exported(cfg: DictConfig, backbone: Backbone) -> bool:
    """Whether `out/export` holds a router that was trained on this backbone with this very config."""
    file = Path(cfg.out) / "export" / "config.json"
    return file.is_file() and json.loads(file.read_text())["training"] == training_record(cfg, backbone)


@dataclass(frozen=True)
class Fitted:
    """A finished training: `trainer`, its loggers, and the module with the best weights."""

    trainer: L.Trainer
    module: RouterModule
    loggers: list[Logger]


def hush_lightning() -> None:
    """Leaves out of the terminal what tells a user of the scripts nothing: tips, and warnings about its own innards."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in (
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        ".*exists and is not empty.*",
        ".*logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def fit(cfg: DictConfig, module: RouterModule, data: TraceData) -> Fitted:
    """Trains `module`, resumes where `resume=true` finds a checkpoint, and loads the best weights back."""
    hush_lightning()
    out = Path(cfg.out)
    loggers: list[Logger] = [CSVLogger(out, name="logs")]
    if cfg.get("logger"):
        loggers.append(instantiate(cfg.logger))
    for logger in loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    best = ModelCheckpoint(out, filename="best", monitor="val/loss", save_last=True, enable_version_counter=False)
    last = out / "last.ckpt"
    resumed = last if cfg.resume and last.is_file() else None
    if not cfg.resume:
        for old in (last, out / "best.ckpt"):
            old.unlink(missing_ok=True)
    trainer = L.Trainer(
        **{**cfg.trainer, "precision": resolve_precision(cfg.trainer.precision)},
        logger=loggers,
        callbacks=[best, EarlyStopping("val/loss", patience=cfg.patience)],
        default_root_dir=out,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=resumed, weights_only=True)
    if not (out / "best.ckpt").is_file():
        raise ValueError(
            f"trainer settings {dict(cfg.trainer)}: the run wrote no checkpoint, so nothing can be exported"
        )
    state = torch.load(out / "best.ckpt", weights_only=True, map_location="cpu")["state_dict"]
    module.load_state_dict(state)
    return Fitted(trainer, module, loggers)


@torch.no_grad()
def scores_of(module: RouterModule, loader) -> tuple[Tensor, Tensor, float]:
    """Scores in [0, 1] and labels of all positions a loader yields, flat, and the mean loss, on the CPU.

    One process sees every row once; a distributed sampler would see some twice.
    """
    module = module.cpu().eval()
    scores, labels, losses = [], [], []
    for batch in loader:
        loss, logit_BK, right_BK, valid_BK = module.scores(batch)
        scores.append(logit_BK[valid_BK].sigmoid())
        labels.append(right_BK[valid_BK])
        losses.append(float(loss) * len(scores[-1]))
    return torch.cat(scores), torch.cat(labels), sum(losses) / sum(len(s) for s in scores)


def test_metrics(fitted: Fitted, score_N: Tensor, right_N: Tensor, loss: float) -> dict[str, float]:
    """The test part's metrics, logged as well."""
    found = router_metrics("test/")(score_N, right_N.long())
    values = {name: float(value) for name, value in found.items()}
    values |= {"test/loss": loss, "test/fpr": 1 - values.pop("test/specificity")}
    for logger in fitted.loggers:
        logger.log_metrics(values)
        logger.save()
    return values
