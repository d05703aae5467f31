"""Which positions a step computes anew, and which keep the keys and values of an earlier step.

Source: Fast-dLLM (Wu et al., 2025), its block-wise approximate KV caches.

    none    every step computes every position
    prefix  a step that opens a block computes every position; those within, from the block's first position on
    dual    likewise, but those within compute the block's positions alone

A block's opening forward is also its first step: it counts as one forward and equals the uncached one. With
`refresh_every` = N > 0 every N-th step of a block computes every position again, so N = 1 equals `none`.
A block that is the suffix left (`Suffix`) is never opened again; there each forward computes from the first position
that was still masked at the forward before. So the cached prefix grows, and every position of it was computed once as a
committed token (LSP, its prefix cache).
"""

import torch
from torch import Tensor

from backbones.base import Backbone
from infer.canvas import Canvas
from infer.rules import Method


class StepCache:
    """Runs the forwards of a decode and keeps the backbone's cache in step with the canvas."""

    def __init__(self, backbone: Backbone, method: Method):
        if method.cache != "none" and getattr(backbone, "new_cache", None) is None:
            why = f" ({backbone.why_no_cache})" if hasattr(backbone, "why_no_cache") else ""
            raise ValueError(f"cache={method.cache}: {backbone.name} has no cache{why}; use cache=none")
        self.backbone, self.kind, self.refresh_every = backbone, method.cache, method.refresh_every
        self.moving = method.block.moving
        self.cache = None
        self.start_B: Tensor | None = None  # first generation position that was masked at the row's last forward
        self._computed: int | Tensor = 0

    @property
    def computed(self) -> int:
        """Positions computed so far, padding left out."""
        return int(self._computed)

    def keep(self, rows: list[int]) -> None:
        if self.cache is not None:
            self.cache.keep(rows)
            self.start_B = self.start_B[rows]

    def reach(self, canvas: Canvas, opening_B: Tensor) -> Tensor:
        """The generation positions (B, L) bool that the step to come computes, and may thus be asked for."""
        if self.kind == "none":
            return torch.ones_like(canvas.masked_BL)
        refill_B, compute_BL = self._plan(canvas, opening_B)
        return compute_BL | refill_B[:, None]

    def logits(self, canvas: Canvas, opening_B: Tensor, asked_BL: Tensor) -> Tensor:
        """Logits (N, V) at the asked positions, row-major. `opening_B`: rows whose block this step opens."""
        length = canvas.gen_length
        asked_BT = torch.nn.functional.pad(asked_BL, (canvas.tokens_BT.shape[1] - length, 0))
        if self.kind == "none":
            self._computed += sum(len(prompt) + length for prompt in canvas.prompts)
            return self.backbone.logits(canvas.tokens_BT, canvas.pad_B, asked_BT)
        refill_B, compute_BL = self._plan(canvas, opening_B)
        self.start_B = canvas.masked_BL.to(torch.uint8).argmax(dim=1)
        compute_BT = torch.nn.functional.pad(compute_BL, (asked_BT.shape[1] - length, 0))
        every_BT = torch.arange(asked_BT.shape[1], device=asked_BL.device) >= canvas.pad_B[:, None]

        refilling = int(refill_B.sum())
        if refilling == len(refill_B):
            return self._forward(canvas, refill_B, every_BT, asked_BT)
        if refilling == 0:
            return self._forward(canvas, ~refill_B, compute_BT, asked_BT)
        # Rows that refill and rows that do not have too different lengths to share a forward.
        logits_NV, row_N = None, asked_BT.nonzero()[:, 0]
        for rows_B, computed_BT in ((refill_B, every_BT), (~refill_B, compute_BT)):
            part_MV = self._forward(canvas, rows_B, computed_BT, asked_BT)
            if logits_NV is None:
                logits_NV = part_MV.new_empty(len(row_N), part_MV.shape[1])
            logits_NV[rows_B[row_N]] = part_MV
        return logits_NV

    def _plan(self, canvas: Canvas, opening_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (B,) bool that compute every position, and the generation positions (B, L) bool that others compute."""
        self._make_room(canvas)
        refill_B = opening_B
        if self.refresh_every:
            refill_B = refill_B | (canvas.block_step_B % self.refresh_every == 0)
        where_L = torch.arange(canvas.gen_length, device=canvas.block_BL.device)
        if self.kind == "dual":
            compute_BL = canvas.block_BL
            if self.moving:
                compute_BL = compute_BL & (where_L >= self.start_B[:, None])
        else:
            first_B = self.start_B if self.moving else canvas.block_BL.to(torch.uint8).argmax(dim=1)
            compute_BL = where_L >= first_B[:, None]
        return refill_B, compute_BL

    def _make_room(self, canvas: Canvas) -> None:
        rows, length = canvas.tokens_BT.shape
        if self.cache is None:
            self.cache = self.backbone.new_cache(rows, length)
            self.start_B = canvas.step_B.new_zeros(rows)
        elif rows > self.cache.rows or length > self.cache.length:
            self.start_B = torch.nn.functional.pad(self.start_B, (0, rows - self.cache.rows))
            self.cache.grow(rows - self.cache.rows, length)

    def _forward(self, canvas: Canvas, rows_B: Tensor, compute_BT: Tensor, asked_BT: Tensor) -> Tensor:
        self._computed = self._computed + (compute_BT & rows_B[:, None]).sum()
        return self.backbone.cached_logits(canvas.tokens_BT, canvas.pad_B, asked_BT, compute_BT, rows_B, self.cache)
