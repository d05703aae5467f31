"""The active suffix: everything after the committed prefix, LSP's block (LSP, §3)."""

from torch import Tensor

from infer.rules import Rule


class Suffix(Rule):
    moving = True  # its start moves with the committed prefix, though no new block is opened

    def form(self, canvas, seen, rows_B: Tensor) -> Tensor:
        return canvas.masked_BL.to(dtype=canvas.step_B.dtype).cummax(dim=1).values.bool()
