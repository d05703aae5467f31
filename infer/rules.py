"""What a block rule, a commit rule, a filter and a method are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from backbones.base import Backbone
from infer.canvas import Canvas
from infer.observation import Observation

CACHES = ("none", "prefix", "dual")


class BlockRule(Protocol):
    """Where: which positions form a row's next block.

    Attributes:
        needs: statistics it reads. Where empty, blocks are formed from the canvas alone, before the forward.
        has_router: whether its time counts as router time.
        contiguous: whether its blocks have no holes.
        moving: whether a block's start moves while it is open, which matters to a cache.
    """

    needs: frozenset[str]
    has_router: bool
    contiguous: bool
    moving: bool

    def bind(self, backbone: Backbone, gen_length: int) -> None:
        """Called once before decoding; raises ValueError where the rule does not fit the backbone or the length."""

    def form(self, canvas: Canvas, seen: Observation | None, rows_B: Tensor) -> Tensor:
        """The next block of the rows in `rows_B` (bool), as (B, L) bool; never empty for a row with masks left."""


class CommitRule(Protocol):
    """When: which masked positions of the active block are committed this step.

    Attributes as in `BlockRule`, and
        contiguous_only: whether the rule means nothing in a block with holes.
        kl_steps: of how many steps it reads the KL divergences, `Observation.kl_BLH`. Where above 0, the denoiser is
            asked for every mask that a step computes, not for the block's alone: they are followed before it opens.
    """

    needs: frozenset[str]
    has_router: bool
    contiguous_only: bool
    kl_steps: int

    def bind(self, backbone: Backbone, gen_length: int) -> None: ...

    def choose(self, canvas: Canvas, seen: Observation, candidates_BL: Tensor) -> Tensor:
        """A subset (B, L) bool of `candidates_BL`, at least one position of each row that has candidates."""


class FilterRule(Protocol):
    """What may not be committed; leaves at least one position of each row that had any. See `infer.filters`."""

    needs: frozenset[str]

    def bind(self, backbone: Backbone, gen_length: int) -> None: ...

    def admit(self, canvas: Canvas, seen: Observation, candidates_BL: Tensor) -> Tensor: ...

    def thin(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> Tensor: ...


class Rule:
    """Defaults shared by rules: no statistics, no router, fits everything."""

    needs: frozenset[str] = frozenset()
    has_router = False
    contiguous = True
    moving = False
    contiguous_only = False
    kl_steps = 0

    def bind(self, backbone: Backbone, gen_length: int) -> None:
        pass


@dataclass(frozen=True)
class Method:
    """A named pair of answers to where and when, with filters, a stop rule and a cache.

    `cache` none, prefix or dual, and `refresh_every`, as in `infer.cache`.
    """

    name: str
    block: BlockRule
    commit: CommitRule
    filters: Sequence[FilterRule] | Mapping[str, FilterRule] = field(default=())  # names are for configs only
    stop: str = "eos"
    cache: str = "none"
    refresh_every: int = 0

    def __post_init__(self):
        filters = self.filters.values() if isinstance(self.filters, Mapping) else self.filters
        object.__setattr__(self, "filters", tuple(filters))
        if self.cache not in CACHES:
            raise ValueError(f"cache={self.cache!r} is unknown; allowed: {', '.join(CACHES)}")
        if self.refresh_every < 0:
            raise ValueError(f"refresh_every={self.refresh_every}: need 0 (at block starts only) or more steps")
        if self.commit.contiguous_only and not self.block.contiguous:
            raise ValueError(
                f"method {self.name!r}: commit rule {type(self.commit).__name__} commits a run from the left, which "
                f"means nothing in the blocks of {type(self.block).__name__}, which have holes; use another"
            )
        if self.commit.contiguous_only and self.filters:
            raise ValueError(
                f"method {self.name!r}: commit rule {type(self.commit).__name__} commits a run from the left, in which "
                f"filters ({', '.join(type(f).__name__ for f in self.filters)}) would leave holes"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Statistics at every step; the block rule's come on top at the steps that open a block."""
        return frozenset().union(self.commit.needs, *(f.needs for f in self.filters))

    def decide(self, canvas: Canvas, seen: Observation) -> Tensor:
        """What commits now, (B, L) bool: filters narrow the candidates, the commit rule chooses, filters thin."""
        candidates_BL = canvas.candidates_BL
        for rule in self.filters:
            candidates_BL = rule.admit(canvas, seen, candidates_BL)
        chosen_BL = self.commit.choose(canvas, seen, candidates_BL)
        for rule in self.filters:
            chosen_BL = rule.thin(canvas, seen, chosen_BL)
        return chosen_BL


def best_BL(score_BL: Tensor, candidates_BL: Tensor) -> Tensor:
    """The candidate of the largest score in each row, (B, L) bool; ties go to the lowest position."""
    score_BL = torch.where(candidates_BL, score_BL, -torch.inf)
    equal_BL = candidates_BL & (score_BL == score_BL.amax(dim=1, keepdim=True))
    return equal_BL & (equal_BL.cumsum(dim=1) == 1)


def order_BL(score_BL: Tensor, candidates_BL: Tensor) -> Tensor:
    """Positions (B, L) of each row: candidates from the largest score down, ties from the left, then all others."""
    # A candidate of score -inf must still come before what is no candidate.
    lowest = torch.finfo(score_BL.dtype).min
    score_BL = torch.where(candidates_BL, score_BL.clamp_min(lowest), -torch.inf)
    return score_BL.argsort(dim=1, descending=True, stable=True)


def take(ordered_BL: Tensor, count_B: Tensor | int, candidates_BL: Tensor) -> Tensor:
    """The first `count_B` positions of an order, as (B, L) bool; at least one, and only candidates."""
    count_B1 = max(count_B, 1) if isinstance(count_B, int) else count_B.clamp_min(1)[:, None]
    early_BL = torch.arange(ordered_BL.shape[1], device=ordered_BL.device) < count_B1
    chosen_BL = torch.empty_like(candidates_BL).scatter_(1, ordered_BL, early_BL.expand_as(ordered_BL))
    return chosen_BL & candidates_BL


def or_best(chosen_BL: Tensor, score_BL: Tensor, candidates_BL: Tensor) -> Tensor:
    """`chosen_BL`, with the best candidate in the rows where it is empty."""
    empty_B1 = ~chosen_BL.any(dim=1, keepdim=True)
    return chosen_BL | (best_BL(score_BL, candidates_BL) & empty_B1)
