"""One block: the whole generation region."""

import torch
from torch import Tensor

from infer.rules import Rule


class Full(Rule):
    def form(self, canvas, seen, rows_B: Tensor) -> Tensor:
        return torch.ones_like(canvas.masked_BL)
