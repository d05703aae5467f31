"""EB-Sampler: as many positions as the bound on their joint dependence allows.

Source: Ben-Hamu et al. (2025), "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking";
compared in DUS (arXiv 2506.19037).

    sort by an error proxy ascending: entropy, confidence (1 - c) or margin (c2 - c)
    commit the longest prefix with sum of H - largest H <= gamma; at least one

Default: gamma = 0.1 bits, the proxy entropy. [reading] the proxy orders, the bound is on entropies whatever the proxy.
The bound grows with every position, so the longest prefix is where it is crossed. Sums run in float64.
"""

import math

import torch
from torch import Tensor

from infer.rules import Rule, order_BL, take
from infer.when.top_k import ranking_needs, ranking_score

PROXIES = ("entropy", "confidence", "margin")


class EntropyBound(Rule):
    def __init__(self, gamma: float = 0.1, proxy: str = "entropy"):
        if gamma < 0:
            raise ValueError(f"gamma={gamma}: need 0 or more bits")
        if proxy not in PROXIES:
            raise ValueError(f"proxy={proxy!r} is unknown; allowed: {', '.join(PROXIES)}")
        self.gamma, self.proxy = gamma, proxy
        self.needs = frozenset({"entropy"}) | ranking_needs(proxy)

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        ordered_BL = order_BL(ranking_score(self.proxy, canvas, seen), candidates_BL)
        bits_BL = seen.entropy_BL.gather(1, ordered_BL).double() / math.log(2)
        excess_BL = bits_BL.cumsum(dim=1) - bits_BL.cummax(dim=1).values
        within_BL = (excess_BL <= self.gamma) & candidates_BL.gather(1, ordered_BL)
        return take(ordered_BL, within_BL.to(torch.uint8).cumprod(dim=1).sum(dim=1), candidates_BL)
