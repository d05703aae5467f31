"""The Lightning module that trains an embedded masked diffusion LM."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from train.denoiser_data import DenoisingBatch
from train.optim import MuonAdamW


class Denoiser(L.LightningModule):
    """LLaDA's SFT objective (Nie et al., 2025, eq. 5): cross-entropy of the masked response tokens.

    The learning rates rise over `warmup` steps, stay flat, and fall linearly to zero over the last `decay` share of
    `max_steps`; raising `max_steps` in a resumed run prolongs the flat part.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        max_steps: int,
        lr_matrix: float,
        lr_other: float,
        weight_decay: float,
        warmup: int,
        decay: float,
        digit_ids: tuple[int, ...],
        eos_id: int,
    ):
        super().__init__()
        self.save_hyperparameters(ignore=["model"])
        self.model = model
        self.register_buffer("digit_ids", torch.tensor(digit_ids), persistent=False)

    def forward(self, batch: DenoisingBatch, asked_BT: Tensor) -> Tensor:
        """Logits (N, V) at the asked positions, row-major."""
        hidden = self.model.model(
            input_ids=batch.noisy_BT,
            position_ids=batch.position_BT,
            attention_mask=batch.attend_BTT[:, None],
            use_cache=False,
        )
        return self.model.lm_head(hidden.last_hidden_state[asked_BT])

    def _losses(self, batch: DenoisingBatch) -> tuple[Tensor, Tensor, Tensor]:
        asked = batch.loss_BT > 0
        logits = self(batch, asked)
        return batch.clean_BT[asked], logits, batch.loss_BT[asked]

    def training_step(self, batch: DenoisingBatch, _):
        target, logits, weight = self._losses(batch)
        loss = (F.cross_entropy(logits.float(), target, reduction="none") * weight).sum()
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/tokens", float(batch.clean_BT.numel()))
        return loss

    def validation_step(self, batch: DenoisingBatch, _, dataloader_idx: int = 0):
        target, logits, _ = self._losses(batch)
        right = logits.argmax(-1) == target
        digit = torch.isin(target, self.digit_ids)
        text = ~digit & (target != self.hparams.eos_id)
        name = ("25", "50", "75", "block", "drills", "results")[dataloader_idx]
        self.log(f"val/ce_{name}", F.cross_entropy(logits[digit | text].float(), target[digit | text]),
                 add_dataloader_idx=False)  # fmt: skip
        self.log(f"val/text_{name}", right[text].float().mean(), add_dataloader_idx=False)
        self.log(f"val/digits_{name}", right[digit].float().mean(), add_dataloader_idx=False, prog_bar=True)

    def configure_optimizers(self):
        h = self.hparams
        matrix = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        chosen = {id(p) for p in matrix}
        other = [p for p in self.model.parameters() if id(p) not in chosen]
        optimizer = MuonAdamW(
            [
                {"params": matrix, "kind": "muon", "lr": h.lr_matrix, "weight_decay": h.weight_decay},
                {"params": other, "kind": "adamw", "lr": h.lr_other},
            ]
        )
        first_decay = h.max_steps * (1 - h.decay)

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(1, h.warmup))
            fall = min(1.0, (h.max_steps - step) / max(1.0, h.max_steps - first_decay))
            return rise * max(0.0, fall)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
