"""Ragged selections of positions as rectangles."""

import torch
from torch import Tensor


def pack_left(mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, K) of each row's True positions in order, and which of them are real; K is the largest count.

    What does not exist points at some other, distinct position of the row, so that a scatter of False is harmless.
    """
    width = int(mask_BL.sum(dim=1).max())
    order_BK = (~mask_BL).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return order_BK, mask_BL.gather(1, order_BK)
