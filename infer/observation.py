"""What a rule may know about a step: statistics of the denoiser's logits at the asked positions.

Everything is float32 whatever the model's dtype, from one pass over the logits. Forbidden ids ([MASK], ids without a
tokenizer entry) have no probability. Only the statistics somebody named are computed.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backbones import host
from backbones.packing import positions

STATISTICS = ("confidence", "second", "entropy", "margin")
# Logits handled at once: 8 MiB in float32 on a CPU, near what its caches hold; on a GPU few kernels, in 128 MiB.
CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 1 << 21, 1 << 25


@dataclass(frozen=True)
class Known:
    """What the host knows of a step without waiting for a GPU.

    Attributes:
        asked: positions asked for in each row.
        candidates: the same of masked positions in the active block; None where a block is yet to be formed from what
            the step observes.
        forming: rows whose block that is.
    """

    asked: Sequence[int]
    candidates: Sequence[int] | None
    forming: Sequence[bool]

    def width(self, candidates_BL: Tensor) -> int | None:
        """At least the largest number of candidates in a row; None where `pack_left` is to count them, at no cost."""
        if self.candidates:
            return max(self.candidates)
        return None if host.at_hand(candidates_BL) else max(self.asked)


@dataclass(frozen=True)
class Observation:
    """Statistics of one step, laid out over the generation region and zero where `asked_BL` is False.

    Attributes:
        asked_BL: bool, the positions the denoiser was asked for.
        top1_BL: int64, the predicted token: the most probable one, or the sampled one at a temperature.
        confidence_BL: probability of `top1_BL`; at a temperature it may be below `second_BL`.
        second_BL: the second largest probability.
        entropy_BL: entropy in nats.
        margin_BL: largest minus second largest logit.
        kl_BLH: KL divergences of the last H steps, newest last, see `infer.drift`; kept where nothing was asked.
        vocab_size: V, over which entropy is normalised.
        broken: bool scalar, whether a logit was NaN; see `check`.
        known: sizes of the step, where the host has them.

    A statistic that nobody asked for is None.
    """

    asked_BL: Tensor
    top1_BL: Tensor
    vocab_size: int
    confidence_BL: Tensor | None = None
    second_BL: Tensor | None = None
    entropy_BL: Tensor | None = None
    margin_BL: Tensor | None = None
    kl_BLH: Tensor | None = None
    broken: Tensor | None = None
    known: Known | None = None

    @property
    def normalised_entropy_BL(self) -> Tensor:
        """Entropy over ln V, in [0, 1]."""
        return self.entropy_BL / math.log(self.vocab_size)

    def check(self) -> "Observation":
        """Itself; ValueError where a logit was NaN. The host waits for a GPU to tell."""
        check_logits(self.broken is not None and bool(self.broken))
        return self


def check_logits(broken: bool) -> None:
    if broken:
        raise ValueError("the backbone gave NaN logits; try backbone.dtype=float32 and check its weights")


def chunk_rows(logits_NV: Tensor) -> int:
    """How many rows of logits are worth handling at once."""
    elements = CPU_CHUNK_ELEMENTS if logits_NV.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    return max(1, elements // logits_NV.shape[1])


def allowed(logits_NV: Tensor, forbidden: Tensor) -> Tensor:
    """A float32 copy with the ids in `forbidden` (K,) int64 at -inf."""
    return logits_NV.to(torch.float32, copy=True).index_fill_(1, forbidden, -torch.inf)


def statistics(
    logits_NV: Tensor,
    needs: frozenset[str],
    forbidden: Tensor,
    temperature: float = 0.0,
    uniform_N: Tensor | None = None,
) -> dict[str, Tensor]:
    """`top1` (N,) and the statistics named in `needs`, each (N,) float32, of logits without those in `forbidden`.

    With `temperature` > 0 the token is sampled from softmax(logits / temperature) by inverting its distribution
    function at `uniform_N` in [0, 1); `confidence` is then that token's probability without the temperature.
    """
    chunk = chunk_rows(logits_NV)
    uniforms = itertools.repeat(None) if uniform_N is None else uniform_N.split(chunk)
    parts = [
        _statistics(allowed(part_MV, forbidden), needs, temperature, uniform_M)
        for part_MV, uniform_M in zip(logits_NV.split(chunk), uniforms, strict=False)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _statistics(z_NV: Tensor, needs: frozenset[str], temperature: float, uniform_N: Tensor | None) -> dict[str, Tensor]:
    # The token comes from `max` whatever is asked for: `topk` orders equal logits otherwise, and equal logits are
    # common in half precision. Watching a decode must not change it.
    best_N, token_N = z_NV.max(dim=-1)
    next_N = z_NV.topk(2, dim=-1).values[:, 1] if needs & {"second", "margin"} else None
    # Shifted by the maximum, so that exponentials never overflow and the largest is exactly 1.
    shifted_NV = z_NV - best_N[:, None]
    weight_NV = shifted_NV.exp()
    total_N = weight_NV.sum(dim=-1)
    if temperature > 0:
        heat_NV = (shifted_NV / temperature).exp().cumsum(dim=-1)
        token_N = (heat_NV <= (uniform_N * heat_NV[:, -1])[:, None]).sum(dim=-1).clamp_max(z_NV.shape[1] - 1)

    found = {"top1": token_N}
    if "confidence" in needs:
        chosen_N = weight_NV.gather(1, token_N[:, None])[:, 0] if temperature > 0 else 1.0
        found["confidence"] = chosen_N / total_N
    if "second" in needs:
        found["second"] = (next_N - best_N).exp() / total_N
    if "entropy" in needs:
        # H = ln Z - sum(p * z); a forbidden id has weight 0 and must not turn 0 * -inf into NaN.
        finite_NV = shifted_NV.clamp_min(torch.finfo(torch.float32).min)
        found["entropy"] = (total_N.log() - (weight_NV * finite_NV).sum(dim=-1) / total_N).clamp_min(0)
    if "margin" in needs:
        found["margin"] = best_N - next_N
    return found


def observe(
    logits_NV: Tensor,
    asked_BL: Tensor,
    needs: frozenset[str],
    forbidden: Tensor,
    temperature: float = 0.0,
    uniform_BL: Tensor | None = None,
    known: Known | None = None,
) -> Observation:
    """The observation of one step. `logits_NV` holds the asked positions row-major; `forbidden` (K,) int64 ids."""
    uniform_N = None if uniform_BL is None else uniform_BL[positions(asked_BL, logits_NV.shape[0])]
    found = statistics(logits_NV, needs | {"confidence"}, forbidden, temperature, uniform_N)
    laid_out = {}
    for name in ("top1", *sorted(needs)):
        flat = found[name]
        empty_BL = torch.zeros(asked_BL.shape, dtype=flat.dtype, device=flat.device)
        # Not empty_BL[asked_BL] = flat, which would look for the positions anew for every statistic.
        laid_out[f"{name}_BL"] = empty_BL.masked_scatter(asked_BL, flat)
    broken = found["confidence"].isnan().any()
    return Observation(asked_BL=asked_BL, vocab_size=logits_NV.shape[1], broken=broken, known=known, **laid_out)
