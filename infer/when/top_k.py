"""Top-k: the k best masked positions of the block by a ranking.

k = 1 by confidence is LLaDA's low-confidence remasking, called "sequential" here: the baseline at 1.0x
(Nie et al., 2025, §2.4; rankings as in DUS, arXiv 2506.19037, §2 and §4.3). Ties go to the lowest position. The margin
of a ranking is of probabilities, c - c2; LSP's, in `stable_prefix`, is of logits.

The `steps` form spreads a block of n masks over S steps as LLaDA's published `generate` does: n // S each, one more
in the first n % S steps; a block with fewer masks than steps takes one a step.
"""

from torch import Tensor

from infer.rules import Rule, order_BL, take

RANKINGS = ("confidence", "entropy", "margin", "random")


def check_ranking(ranking: str) -> None:
    if ranking not in RANKINGS:
        raise ValueError(f"ranking={ranking!r} is unknown; allowed: {', '.join(RANKINGS)}")


def ranking_needs(ranking: str) -> frozenset[str]:
    if ranking == "margin":
        return frozenset({"confidence", "second"})
    return frozenset() if ranking == "random" else frozenset({ranking})


def ranking_score(ranking: str, canvas, seen) -> Tensor:
    """Scores (B, L), larger is better. `random` is an order drawn per request, the same at every step."""
    if ranking == "random":
        return canvas.lot_BL
    if ranking == "margin":
        return seen.confidence_BL - seen.second_BL
    return -seen.entropy_BL if ranking == "entropy" else seen.confidence_BL


class TopK(Rule):
    """`k` positions a step, or with `steps` a whole block in that many steps; then `k` is not used."""

    def __init__(self, k: int = 1, ranking: str = "confidence", steps: int | None = None):
        if k < 1:
            raise ValueError(f"k={k}: a step commits at least 1 position")
        if steps is not None and steps < 1:
            raise ValueError(f"steps={steps}: a block takes at least 1")
        check_ranking(ranking)
        self.k, self.steps, self.ranking = k, steps, ranking
        self.needs = ranking_needs(ranking)

    def choose(self, canvas, seen, candidates_BL: Tensor) -> Tensor:
        if self.steps is None:
            count_B = self.k
        else:
            size_B = canvas.block_BL.sum(dim=1)
            count_B = size_B // self.steps + (canvas.block_step_B < size_B % self.steps)
        return take(order_BL(ranking_score(self.ranking, canvas, seen), candidates_BL), count_B, candidates_BL)
