"""Trains `llada_tiny`, the embedded masked diffusion LM, and exports it as a LLaDA folder.

python train/backbone.py out=runs/backbone optim.max_steps=5000
"""

from pathlib import Path

import hydra
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig

from backbones.llada import load_model, new_model, save_checkpoint
from train.backbone_setup import last_checkpoint, make_config, make_loaders, make_masking, make_tokenizer
from train.copying_init import start_from_copying
from train.denoiser import Denoiser
from train.hardware import resolve_precision


@hydra.main(config_path="../conf", config_name="train_backbone", version_base="1.3")
def main(cfg: DictConfig) -> None:
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    L.seed_everything(cfg.seed)
    out = Path(cfg.out)
    resumed = last_checkpoint(out) if cfg.resume else None
    if resumed:  # the tokenizer of the first run stays the run's tokenizer
        cfg.data.tokenizer = str(out / "tokenizer")
    tokenizer = make_tokenizer(cfg)
    tokenizer.save_pretrained(out / "tokenizer")
    config = make_config(cfg, tokenizer)
    model = load_model(Path(cfg.model.init), torch.float32) if cfg.model.init else new_model(config)
    if cfg.model.copying_init and not cfg.model.init:
        start_from_copying(model, tokenizer.mask_token_id, cfg.seed)
    masking = make_masking(cfg, tokenizer)
    optim = {k: v for k, v in cfg.optim.items() if k not in ("clip", "val_every")}
    module = Denoiser(model, digit_ids=masking.digit_ids, eos_id=masking.eos_id, **optim)
    first = torch.load(resumed, weights_only=True)["global_step"] if resumed else 0
    train, validation = make_loaders(cfg, tokenizer, first)
    trainer = L.Trainer(
        max_steps=min(cfg.stop_at or cfg.optim.max_steps, cfg.optim.max_steps),
        max_time=cfg.max_time,
        precision=resolve_precision(cfg.precision),
        gradient_clip_val=cfg.optim.clip,
        val_check_interval=cfg.optim.val_every,
        limit_train_batches=10**9,
        num_sanity_val_steps=0,
        log_every_n_steps=cfg.log_every,
        logger=CSVLogger(out, name="logs"),
        callbacks=[
            ModelCheckpoint(
                out, filename="step", save_last=True, every_n_train_steps=cfg.checkpoint_every, save_top_k=0
            )
        ],
        default_root_dir=out,
    )
    trainer.fit(module, train, validation, ckpt_path=resumed, weights_only=True)
    save_checkpoint(out / "export", model, config, tokenizer, torch.float32)
    print(f"exported {out / 'export'} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
