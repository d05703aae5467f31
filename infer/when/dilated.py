"""DUS, dilated unmasking: a plan made before decoding spreads each round wide over the block.

Source: DUS (arXiv 2506.19037), §3.5; `DilatedCounts` is the comparison of §4.3.

    a block of B: stride B // a ** base_skip, divided by a after each round down to 1
    round t commits the positions with offset % stride_t == 0 that no earlier round took
    leftovers form a last round; a last round smaller than the one before is merged into it

B = 8, a = 2, base_skip = 1: offsets {0, 4}, {2, 6}, {1, 3, 5, 7}. Optional skip: a planned position with c < c_skip
waits for the next round; the last round commits all that is left. [reading] where a round would commit nothing, its
best position goes, and in a block with holes an offset is the rank within the block.
"""

from functools import cache

import torch
from torch import Tensor

from infer.rules import Rule, or_best, order_BL, take
from infer.when.threshold import check_probability
from infer.when.top_k import check_ranking, ranking_needs, ranking_score


@cache
def plan(size: int, base: int = 2, base_skip: int = 1) -> tuple[int, ...]:
    """The round in which each of `size` offsets is committed."""
    rounds: list[list[int]] = []
    left = list(range(size))
    stride = size // base**base_skip
    while left and stride >= 1:
        taken = [i for i in left if i % stride == 0]
        if taken:
            rounds.append(taken)
        left = [i for i in left if i % stride]
        stride //= base
    if left:
        rounds.append(left)
    if len(rounds) > 1 and len(rounds[-1]) < len(rounds[-2]):
        rounds[-2:] = [rounds[-2] + rounds[-1]]
    number = {i: t for t, taken in enumerate(rounds) for i in taken}
    return tuple(number[i] for i in range(size))


class _Planned(Rule):
    """Holds the plans of all block sizes N up to the generation length: by offset the round, and by round the count."""

    def __init__(self, base: int, base_skip: int):
        if base < 2:
            raise ValueError(f"base={base}: need at least 2")
        if base_skip < 0:
            raise ValueError(f"base_skip={base_skip}: need 0 or more")
        self.base, self.base_skip = base, base_skip

    def bind(self, backbone, gen_length: int) -> None:
        rounds = torch.arange(gen_length)
        self.round_NL = torch.zeros(gen_length + 1, gen_length, dtype=torch.long)
        self.last_N = torch.zeros(gen_length + 1, dtype=torch.long)
        self.planned_NT = torch.zeros(gen_length + 1, gen_length, dtype=torch.long)
        for size in range(1, gen_length + 1):
            round_L = torch.tensor(plan(size, self.base, self.base_skip))
            self.round_NL[size, :size], self.last_N[size] = round_L, round_L.max()
            self.planned_NT[size] = (round_L <= rounds[:, None]).sum(dim=1)
        for name in ("round_NL", "last_N", "planned_NT"):
            setattr(self, name, getattr(self, name).to(backbone.device))

    def rounds(self, canvas) -> tuple[Tensor, Tensor, Tensor]:
        """The planned round of each position of the block (B, L), the last round and the one a row is at, both (B,)."""
        offset_BL = canvas.block_BL.cumsum(dim=1)
        size_B = offset_BL[:, -1]
        round_BL = self.round_NL[size_B].gather(1, (offset_BL - 1).clamp_min(0))
        last_B = self.last_N[size_B]
        return round_BL, last_B, canvas.block_step_B.minimum(last_B)


class Dilated(_Planned):
    def __init__(self, base: int = 2, base_skip: int = 1, skip_below: float | None = None):
        super().__init__(base, base_skip)
        self.skip_below = None if skip_below is None else check_probability("skip_below", skip_below)
        self.needs = frozenset() if skip_below is None else frozenset({"confidence"})

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        round_BL, last_B, now_B = self.rounds(canvas)
        due_BL = candidates_BL & (round_BL <= now_B[:, None])
        if self.skip_below is None:
            # After a filter held positions back none may be due; the next planned one goes then.
            return or_best(due_BL, -round_BL, candidates_BL)
        sure_BL = due_BL & ((seen.confidence_BL >= self.skip_below) | (now_B == last_B)[:, None])
        sure_BL = or_best(sure_BL, seen.confidence_BL, due_BL)
        return or_best(sure_BL, -round_BL, candidates_BL)


class DilatedCounts(_Planned):
    """The round sizes of `Dilated`, the positions by a ranking."""

    def __init__(self, base: int = 2, base_skip: int = 1, ranking: str = "confidence"):
        super().__init__(base, base_skip)
        check_ranking(ranking)
        self.ranking, self.needs = ranking, ranking_needs(ranking)

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        # What the plan has committed by the end of this round, less what the block has committed already.
        size_B = canvas.block_BL.sum(dim=1)
        planned_B = self.planned_NT[size_B, canvas.block_step_B.minimum(self.last_N[size_B])]
        done_B = size_B - canvas.candidates_BL.sum(dim=1)
        score_BL = ranking_score(self.ranking, canvas, seen)
        return take(order_BL(score_BL, candidates_BL), planned_B - done_B, candidates_BL)
