"""LPS, the router that finds predictions ready to be committed (EB-Decode, arXiv 2609.16450, §5.2, App. D.1).

Per masked position of the active block five features and an embedding of the rank in the block, two pre-norm
Transformer blocks with four heads, one logit. About 27k trainable parameters.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routers.checkpoint import RouterModule
from routers.config import LPSConfig
from routers.encoder import Encoder, PositionwiseMLP

FEATURES = ("position", "confidence", "entropy", "gap", "mask_ratio")
STATISTICS = ("confidence", "second", "entropy")  # what of an observation the features are made from


class Features(NamedTuple):
    """Inputs of LPS for masked positions packed into K columns.

    `values_BK5` float32 in the order of `FEATURES`: relative position in the block [0, 1), confidence, normalised
    entropy, confidence minus second confidence, share of the block still masked; `rank_BK` int64, rank among the
    block's positions; `valid_BK` bool.
    """

    values_BK5: Tensor
    rank_BK: Tensor
    valid_BK: Tensor

    @classmethod
    def of(
        cls, *, rank: Tensor, block_size: Tensor, confidence: Tensor, second: Tensor, entropy: Tensor, valid: Tensor
    ) -> "Features":
        """From tensors of shape (B, K); `block_size` (B,) counts committed members too; `entropy` is normalised."""
        size_B1 = block_size[:, None].float()
        ratio_B1 = valid.sum(dim=1, keepdim=True) / size_B1
        columns = [rank / size_B1, confidence, entropy, confidence - second, ratio_B1.expand_as(confidence)]
        return cls(torch.stack(columns, dim=-1), rank, valid)


class LPS(RouterModule):
    config_class = LPSConfig

    def __init__(self, config: LPSConfig):
        super().__init__()
        self.config = config
        self.columns = [FEATURES.index(name) for name in config.features]
        self.input = nn.Linear(len(self.columns), config.width)
        self.rank = nn.Embedding(config.max_block, config.width) if config.position_embedding else None
        if self.rank is not None:
            nn.init.normal_(self.rank.weight, std=0.02)
        if config.encoder == "transformer":
            self.encoder = Encoder(config.width, config.heads, config.mlp_width, config.layers)
        else:
            self.encoder = PositionwiseMLP(config.width, config.mlp_width, config.layers)
        self.head = nn.Linear(config.width, 1)

    def forward(self, features: Features) -> Tensor:
        """Logits (B, K) float32 that the prediction equals the final token; meaningless where not valid."""
        values = features.values_BK5
        x_BKw = self.input(values if len(self.columns) == len(FEATURES) else values[..., self.columns])
        if self.rank is not None:
            x_BKw = x_BKw + self.rank(features.rank_BK.clamp_max(self.config.max_block - 1))
        return self.head(self.encoder(x_BKw, features.valid_BK))[..., 0]


def lps_loss(logit_BK: Tensor, right_BK: Tensor, valid_BK: Tensor, *, negative_weight: float) -> Tensor:
    """Mean binary cross-entropy over positions, those whose prediction is wrong weighted `negative_weight` (App. D.3).

    A false positive commits a wrong token for good; a false negative only waits.
    """
    weight_BK = torch.where(right_BK, 1.0, negative_weight) * valid_BK
    entropy_BK = F.binary_cross_entropy_with_logits(logit_BK, right_BK.float(), reduction="none")
    return (weight_BK * entropy_BK).sum() / valid_BK.sum().clamp_min(1)
