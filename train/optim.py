"""Muon for the blocks' matrices and AdamW for everything else, as one optimiser.

`torch.optim.Muon` orthogonalises in bfloat16, which a CPU without bfloat16 instructions runs some twenty times
slower than float32, and one matrix at a time. This one works in the gradient's dtype and stacks equal shapes.
"""

from collections import defaultdict

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients of Jordan et al., "Muon" (2024).
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(grad_NMK: Tensor, steps: int = 5) -> Tensor:
    """Pushes the singular values of each of N matrices (M, K) towards 1; shape and dtype are kept."""
    wide = grad_NMK.shape[-2] <= grad_NMK.shape[-1]
    x = grad_NMK if wide else grad_NMK.mT
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C) @ x
    return x if wide else x.mT


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups carry `kind`: "muon" (2-D weights) or "adamw".

    Muon: Nesterov momentum 0.95, update scaled by max(1, rows / columns) ** 0.5. Both: decoupled weight decay.
    """

    def __init__(self, groups: list[dict], *, momentum: float = 0.95, betas=(0.9, 0.98), eps: float = 1e-8):
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._muon if group["kind"] == "muon" else self._adamw)(group)
        return loss

    def _muon(self, group: dict) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[p.shape].append(p)
        for shape, params in by_shape.items():
            grads = torch.stack([p.grad for p in params])
            moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
            for moment, grad in zip(moments, grads, strict=True):
                moment.lerp_(grad, 1 - group["momentum"])
            updates = orthogonalise(grads.lerp_(torch.stack(moments), group["momentum"]))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for p, update in zip(params, updates, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)

    def _adamw(self, group: dict) -> None:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            state["mean"].lerp_(p.grad, 1 - beta1)
            state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            denominator = (state["square"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(state["mean"], denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
