"""LBS, the router that picks the next block (EB-Decode, arXiv 2609.16450, §5.1, App. C.1).

Per masked position the normalised entropy and the top-1 token are embedded and fused, a position embedding over the
generation length is added, a 2-layer Transformer encoder runs over the masked positions, and a head gives one
inclusion logit. About 600k trainable parameters at LLaDA-8B's width.

[reading] The token embedding is the backbone's own input embedding, frozen, with rows scaled to unit RMS, through a
learned projection: so a router belongs to one vocabulary and one generation length, as §6.4 says.
"""

import math

import torch
from torch import Tensor, nn

from routers.checkpoint import RouterModule
from routers.config import LBSConfig
from routers.encoder import Encoder


class LBS(RouterModule):
    config_class = LBSConfig

    def __init__(self, config: LBSConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.entropy = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        if config.inputs == "both":
            self.token = nn.Linear(config.embedding_size, width, bias=False)
            self.fuse = nn.Linear(2 * width, width)
        else:
            self.fuse = nn.Linear(width, width)
        self.position = nn.Embedding(config.origin.gen_length, width)
        nn.init.normal_(self.position.weight, std=0.02)
        self.encoder = Encoder(width, config.heads, config.mlp_width, config.layers)
        self.head = nn.Linear(width, 1)
        # Not buffers: data-parallel training would send the whole table to every device at every step.
        self.table_Vd: Tensor | None = None
        self.projected_Vw: Tensor | None = None

    def attach_embedding(self, embedding_Vd: Tensor) -> None:
        """Gives the router the backbone's frozen input embedding, (V, d); needed before `forward`."""
        if self.config.inputs == "entropy":
            return
        if embedding_Vd.shape[1] != self.config.embedding_size:
            raise ValueError(
                f"the backbone's embedding is {embedding_Vd.shape[1]} wide, the router's {self.config.embedding_size}"
            )
        table_Vd = embedding_Vd.detach().float().to(self.head.weight.device)
        self.table_Vd = table_Vd / table_Vd.pow(2).mean(dim=1, keepdim=True).add(1e-12).sqrt()
        self.projected_Vw = None

    @torch.no_grad()
    def cache_embedding(self, embedding_Vd: Tensor) -> None:
        """For inference: projects the whole table once, so that a token costs one lookup."""
        self.attach_embedding(embedding_Vd)
        if self.config.inputs == "both":
            self.projected_Vw = self.token(self.table_Vd)
            self.table_Vd = None

    def forward(self, entropy_BK: Tensor, token_BK: Tensor, position_BK: Tensor, valid_BK: Tensor) -> Tensor:
        """Inclusion logits (B, K) float32 of masked positions packed into K columns.

        `entropy_BK` normalised entropy in [0, 1]; `token_BK` top-1 ids; `position_BK` index in the generation region;
        `valid_BK` bool, False in columns that hold no position (their logits mean nothing).
        """
        x_BKw = self.entropy(entropy_BK[..., None])
        if self.config.inputs == "both":
            if self.projected_Vw is not None:
                token_BKw = self.projected_Vw[token_BK]
            else:
                self.table_Vd = self.table_Vd.to(token_BK.device)
                token_BKw = self.token(self.table_Vd[token_BK])
            x_BKw = torch.cat([x_BKw, token_BKw], dim=-1)
        x_BKw = self.fuse(x_BKw) + self.position(position_BK)
        return self.head(self.encoder(x_BKw, valid_BK))[..., 0]


def lbs_loss(
    logit_BK: Tensor,
    loss_BK: Tensor,
    right_BK: Tensor,
    valid_BK: Tensor,
    *,
    wrong_weight: float,
    reward: float,
    cap: float = math.inf,
) -> Tensor:
    """Cost of including uncertain positions minus a reward for inclusion; scalar, may be negative (App. C.2).

        mean over positions of  w_i * pi_i * l_i - lambda * pi_i,   pi_i = sigmoid(logit_i)

    `loss_BK` the backbone's cross-entropy l_i in nats; `right_BK` whether its top-1 token is right; w_i is
    `wrong_weight` (> 1) where it is wrong, else 1; lambda is `reward`. [reading] of "weighted cross-entropy that
    favours correct, low-loss positions, and a regulariser that rewards larger total inclusion". Its optimum includes a
    position exactly where the expected w_i * l_i is below lambda.

    `cap` bounds w_i * l_i at cap * lambda. [reading] Where the mean of what it bounds is far from lambda, all logits
    move together until the sigmoid is flat, and nothing, or everything, is included for good: see `balanced_cap`.
    """
    weight_BK = torch.where(right_BK, 1.0, wrong_weight)
    cost_BK = logit_BK.sigmoid() * ((weight_BK * loss_BK).clamp_max(cap * reward) - reward)
    return (cost_BK * valid_BK).sum() / valid_BK.sum().clamp_min(1)


def balanced_cap(cost_N: Tensor, reward: float) -> float:
    """The `cap` at which costs w_i * l_i (N,) of training positions, bounded by it, have `reward` as their mean.

    Including everything is then worth as much as including nothing, and training starts with no push either way. inf
    where even the unbounded mean is not above `reward`.
    """
    cost_N = cost_N.double().sort().values
    # With the k smallest costs as they are and the others at the bound c: sum of those + (N - k) * c = N * reward.
    below_N = torch.nn.functional.pad(cost_N.cumsum(0)[:-1], (1, 0))
    count = len(cost_N)
    bound_N = (count * reward - below_N) / torch.arange(count, 0, -1, dtype=torch.double)
    fits_N = bound_N <= cost_N
    return float(bound_N[fits_N.int().argmax()] / reward) if bool(fits_N.any()) else math.inf
