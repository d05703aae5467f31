"""Oracle: every candidate whose prediction equals a given reference completion, else the best one.

Not a method but the ceiling that methods are measured against: what a router that is never wrong would commit.
"""

from torch import Tensor

from infer.rules import Rule, or_best


class Oracle(Rule):
    needs = frozenset({"confidence"})

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        if canvas.reference_BL is None:
            raise ValueError("method=oracle needs a reference completion for every prompt; eval/compare.py makes them")
        right_BL = candidates_BL & (seen.top1_BL == canvas.reference_BL)
        return or_best(right_BL, seen.confidence_BL, candidates_BL)
