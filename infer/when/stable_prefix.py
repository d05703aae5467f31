"""LSP, longest stable prefix: commits a contiguous run from the left, sized by margins and cut at a delimiter.

Source: LSP, "Beyond Scattered Acceptance: Fast and Coherent Inference for DLMs via Longest Stable Prefixes", §3 and
Algorithm 1; the ablations are those of its §4.3.

    N candidates with logit margins delta_1..N, prefix minima m_j = min(delta_1..j)
    j is reachable by a threshold if m_(j+1) < m_j or j = N
    L' = the longest reachable j in [ceil(alpha N), floor(beta N)], else ceil(alpha N) [reading: the paper names none]
    L = max(L_min, last delimiter j <= L' with L' - j <= W); no delimiter in reach -> L_min

Defaults: alpha = 0.25, beta = 0.5, L_min = 1, W = 16, one setting for all models (§4.1).
"""

import torch
from torch import Tensor

from infer.rules import Rule, order_BL, take

# Punctuation, newline and code symbols. A token counts if, spaces aside, it consists of these alone.
DELIMITERS = ".,;:!?\n()[]{}<>=+-*/%&|^~#\"'`\\@$"


def delimiter_ids(tokenizer, vocab_size: int, delimiters: str) -> Tensor:
    """(V,) bool: the tokens made of `delimiters` and spaces alone, special tokens left out."""
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[i] for i in range(min(len(tokenizer), vocab_size))])
    ids = [i for i, t in enumerate(texts) if i not in special and t.strip(" ") and set(t.strip(" ")) <= set(delimiters)]
    flags_V = torch.zeros(vocab_size, dtype=torch.bool)
    flags_V[ids] = True
    return flags_V


class _Sized(Rule):
    """What LSP and its scattered ablation share: how many."""

    def __init__(self, alpha: float = 0.25, beta: float = 0.5):
        if not 0 < alpha <= beta <= 1:
            raise ValueError(f"alpha={alpha}, beta={beta}: need 0 < alpha <= beta <= 1")
        self.alpha, self.beta = alpha, beta
        self.needs = frozenset({"margin"})

    def bind(self, backbone, gen_length: int) -> None:
        counts_N = torch.arange(gen_length + 1, device=backbone.device).double()
        shortest_N, self.longest_N = (self.alpha * counts_N).ceil().long(), (self.beta * counts_N).floor().long()
        # All N are always reachable, where they are not too many.
        self.least_N = torch.where(counts_N <= self.longest_N, counts_N.long(), shortest_N)

    def adaptive_length(self, margin_BL: Tensor, candidates_BL: Tensor, rank_BL: Tensor) -> Tensor:
        """L' (B, 1); `rank_BL` counts candidates from the left, the first is 1."""
        lowest_BL = torch.where(candidates_BL, margin_BL, torch.inf).cummin(dim=1).values
        count_B1 = rank_BL[:, -1:]
        # The minimum falls only at a candidate, and then the j candidates before it can be told from the rest. In the
        # first column, which roll compares with the last, it never does.
        before_BL = rank_BL - 1
        inside_BL = (lowest_BL < lowest_BL.roll(1, dims=1)) & (before_BL <= self.longest_N[count_B1])
        return (inside_BL * before_BL).amax(dim=1, keepdim=True).maximum(self.least_N[count_B1])


class StablePrefix(_Sized):
    """`snap=False` is the ablation without snapping: max(L_min, L') are committed."""

    contiguous_only = True

    def __init__(
        self,
        alpha: float = 0.25,
        beta: float = 0.5,
        l_min: int = 1,
        window: int = 16,
        snap: bool = True,
        delimiters: str = DELIMITERS,
    ):
        super().__init__(alpha, beta)
        if l_min < 1 or window < 0:
            raise ValueError(f"l_min={l_min}, window={window}: need at least 1 and 0")
        self.l_min, self.window, self.snap, self.delimiters = l_min, window, snap, delimiters

    def bind(self, backbone, gen_length: int) -> None:
        super().bind(backbone, gen_length)
        if self.snap:
            flags_V = delimiter_ids(backbone.tokenizer, backbone.vocab_size, self.delimiters)
            if not bool(flags_V.any()):
                raise ValueError(f"delimiters={self.delimiters!r}: no token of {backbone.name} consists of these")
            self.delimiter_V = flags_V.to(backbone.device)

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        rank_BL = candidates_BL.cumsum(dim=1)
        length_B1 = self.adaptive_length(seen.margin_BL, candidates_BL, rank_BL)
        if self.snap:
            at_BL = self.delimiter_V[seen.top1_BL] & candidates_BL
            at_BL &= (rank_BL <= length_B1) & (rank_BL >= length_B1 - self.window)
            length_B1 = (at_BL * rank_BL).amax(dim=1, keepdim=True)
        return candidates_BL & (rank_BL <= length_B1.clamp_min(self.l_min))


class ScatteredMargin(_Sized):
    """LSP's ablation of its topology (§4.3.3): L' positions from anywhere, the largest margins first."""

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        length_B1 = self.adaptive_length(seen.margin_BL, candidates_BL, candidates_BL.cumsum(dim=1))
        return take(order_BL(seen.margin_BL, candidates_BL), length_B1[:, 0], candidates_BL)


class FixedPrefix(Rule):
    """LSP's ablation of its adaptive size (§4.3.1): the next `k` from the left."""

    contiguous_only = True

    def __init__(self, k: int = 4):
        if k < 1:
            raise ValueError(f"k={k}: a step commits at least 1 position")
        self.k = k

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        return candidates_BL & (candidates_BL.cumsum(dim=1) <= self.k)
