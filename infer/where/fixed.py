"""Fixed blocks: contiguous, left to right; the next opens when the last is full.

Source: semi-autoregressive decoding of LLaDA (Nie et al., 2025, §2.4). Default: 32 positions. Where L is not a
multiple of the block length the last block is shorter.
"""

import torch
from torch import Tensor

from infer.rules import Rule


class Fixed(Rule):
    def __init__(self, block_length: int = 32):
        if block_length < 1:
            raise ValueError(f"block_length={block_length}: need at least 1 position")
        self.block_length = block_length

    def bind(self, backbone, gen_length: int) -> None:
        if self.block_length > gen_length:
            raise ValueError(
                f"block_length={self.block_length}: longer than gen_length={gen_length}; give at most that, or "
                "block=full"
            )

    def form(self, canvas, seen, rows_B: Tensor) -> Tensor:
        first_B1 = canvas.masked_BL.float().argmax(dim=1, keepdim=True)
        start_B1 = first_B1 // self.block_length * self.block_length
        where_L = torch.arange(canvas.gen_length, device=first_B1.device)
        return (where_L >= start_B1) & (where_L < start_B1 + self.block_length)
