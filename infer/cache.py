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

from collections.abc import Sequence

import torch
from torch import Tensor

from backbones.base import Backbone, Sizes
from backbones.packing import positions
from infer.canvas import Canvas
from infer.plan import Plan
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
        self.computed = 0  # positions computed so far, padding left out

    def keep(self, rows: list[int]) -> None:
        if self.cache is not None:
            self.cache.keep(rows)
            self.start_B = self.start_B[rows]

    def plan(self, canvas: Canvas, full_B: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows (B,) bool that the step to come computes whole, and the generation positions (B, L) bool that it
        computes, in those rows all; None where every step computes everything.

        `full_B`: rows whose block was full, so that another is open since, or opens in the step.
        """
        if self.kind == "none":
            return None
        self._make_room(canvas)
        refill_B = full_B | (canvas.block_step_B == 0)
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
        return refill_B, compute_BL | refill_B[:, None]

    def columns(self, canvas: Canvas, refill_B: Tensor, compute_BL: Tensor, asked_BT: Tensor) -> Tensor:
        """What `plan` gave and what the asked columns are predicted from, as columns (B, T) bool of the canvas."""
        compute_BT, sources_BT = canvas.columns(compute_BL), self.backbone.sources(asked_BT, canvas.pad_B)
        if sources_BT is not asked_BT:
            compute_BT = compute_BT | sources_BT
        real_BT = torch.arange(compute_BT.shape[1], device=compute_BT.device) >= canvas.pad_B[:, None]
        return torch.where(refill_B[:, None], real_BT, compute_BT)

    def logits(self, canvas: Canvas, plan: Plan) -> Tensor:
        """Logits (N, V) at the positions that the plan asks for, row-major."""
        if plan.compute_BT is None:
            self.computed += sum(len(prompt) + canvas.gen_length for prompt in canvas.prompts)
            sizes = Sizes(plan.known.asked, canvas.pads)
            return self.backbone.logits(canvas.tokens_BT, canvas.pad_B, plan.asked_BT, sizes)
        self.start_B = canvas.masked_BL.to(torch.uint8).argmax(dim=1)
        self.computed += sum(plan.computed)
        if len(set(plan.refilling)) == 1:
            return self._forward(canvas, plan, torch.ones_like(plan.refill_B), range(len(plan.computed)))
        # Rows that refill and rows that do not have too different lengths to share a forward.
        logits_NV, row_N = None, positions(plan.asked_BT, sum(plan.known.asked))[0]
        for refills in (True, False):
            rows_B = plan.refill_B if refills else ~plan.refill_B
            rows = [row for row, refilling in enumerate(plan.refilling) if refilling == refills]
            part_MV = self._forward(canvas, plan, rows_B, rows)
            if logits_NV is None:
                logits_NV = part_MV.new_empty(len(row_N), part_MV.shape[1])
            logits_NV[positions(rows_B[row_N], len(part_MV))] = part_MV
        return logits_NV

    def _make_room(self, canvas: Canvas) -> None:
        rows, length = canvas.tokens_BT.shape
        if self.cache is None:
            self.cache = self.backbone.new_cache(rows, length)
            self.start_B = canvas.step_B.new_zeros(rows)
        elif rows > self.cache.rows or length > self.cache.length:
            self.start_B = torch.nn.functional.pad(self.start_B, (0, rows - self.cache.rows))
            self.cache.grow(rows - self.cache.rows, length)

    def _forward(self, canvas: Canvas, plan: Plan, rows_B: Tensor, rows: Sequence[int]) -> Tensor:
        sizes = Sizes(*([counts[row] for row in rows] for counts in (plan.known.asked, canvas.pads, plan.computed)))
        batch = canvas.tokens_BT, canvas.pad_B, plan.asked_BT
        return self.backbone.cached_logits(*batch, plan.compute_BT, rows_B, self.cache, sizes)
