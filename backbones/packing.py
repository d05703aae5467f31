"""Ragged selections of positions as rectangles."""

import torch
from torch import Tensor

from backbones import host


def positions(mask: Tensor, count: int | None = None) -> tuple[Tensor, ...]:
    """The indices of what is True, one int64 tensor a dimension, row-major. With their `count` known to the caller the
    host does not wait for a GPU to tell it."""
    if count is None or host.at_hand(mask):  # there `nonzero_static` is the slower one
        return mask.nonzero(as_tuple=True)
    return torch.nonzero_static(mask, size=count).unbind(dim=1)


def pack_left(mask_BL: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices (B, K) of each row's True positions in order, and which of them are real.

    K is `width`, which no row's count may exceed; None: the largest count, for which the host waits for a GPU. What
    does not exist points at some other, distinct position of the row, so that a scatter of False is harmless.
    """
    if width is None:
        width = int(mask_BL.sum(dim=1).max())
    order_BK = (~mask_BL).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return order_BK, mask_BL.gather(1, order_BK)
