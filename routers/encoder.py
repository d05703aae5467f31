"""A small pre-norm Transformer encoder over ragged sets of positions."""

import torch.nn.functional as F
from torch import Tensor, nn


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP. `valid_BK` (bool) marks the positions that exist; the others are never attended."""

    def __init__(self, width: int, heads: int, mlp_width: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp_width)
        self.mlp_out = nn.Linear(mlp_width, width)

    def forward(self, x_BKd: Tensor, valid_BK: Tensor | None) -> Tensor:
        rows, length, width = x_BKd.shape
        qkv = self.qkv(self.attention_norm(x_BKd)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = None if valid_BK is None else valid_BK[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x_BKd = x_BKd + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        return x_BKd + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BKd))))


class Encoder(nn.Module):
    """`layers` blocks and a final norm."""

    def __init__(self, width: int, heads: int, mlp_width: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, mlp_width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BKd: Tensor, valid_BK: Tensor) -> Tensor:
        # A single row, or rows of equal length, need no mask, and attention without one is faster. Not on a GPU, where
        # a look at the result would make the host wait for the whole forward behind which it is queued.
        mask = None if valid_BK.device.type == "cpu" and bool(valid_BK.all()) else valid_BK
        for block in self.blocks:
            x_BKd = block(x_BKd, mask)
        return self.norm(x_BKd)


class PositionwiseMLP(nn.Module):
    """The ablation of the encoder: the same width and depth, every position alone."""

    def __init__(self, width: int, mlp_width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BKd: Tensor, valid_BK: Tensor) -> Tensor:
        for layer in self.layers:
            x_BKd = x_BKd + layer(x_BKd)
        return self.norm(x_BKd)
