"""Tokenised problems, length-bucketed batches and the masking of LLaDA's SFT objective."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from train.drills import Drills


@dataclass(frozen=True)
class Example:
    """One tokenised problem: chat-formatted prompt and solution ids without EOS.

    `counted`: which solution ids have a loss in two-stream batches; None for all, and the EOS behind them.
    """

    prompt: np.ndarray
    solution: np.ndarray
    counted: np.ndarray | None = None


class DenoisingBatch(NamedTuple):
    """A padded batch, prompts on the left so that responses line up.

    Shapes: `clean_BT` and `noisy_BT` (B, T) int64; `loss_BT` (B, T) float32, the weight of each position's
    cross-entropy, zero where nothing is masked; `position_BT` (B, T) int64, counted from each row's first real token;
    `attend_BTT` (B, T, T) bool, which keys (last) each query sees.
    """

    clean_BT: Tensor
    noisy_BT: Tensor
    loss_BT: Tensor
    position_BT: Tensor
    attend_BTT: Tensor


@dataclass(frozen=True)
class Masking:
    """How responses are masked and how positions weigh.

    LLaDA masks every response token, EOS padding included, with probability t ~ U(0, 1] (`uniform`). A share of rows
    is masked as decoding meets it (`blockwise`): a clean prefix, one block at ratio t, all masks behind it; there only
    the block's positions have a loss.
    A row's loss is divided by its weighted number of masked tokens, which has far less variance than 1/t.

    A share of the batches (`two_stream`) asks for every response token at once instead, see `two_stream_batch`.
    """

    gen_length: int
    block_length: int
    blockwise: float
    full_tail: float
    two_stream: float
    eos_weight: float
    digit_weight: float
    mask_id: int
    eos_id: int
    digit_ids: tuple[int, ...]

    def __post_init__(self):
        if min(self.eos_weight, self.digit_weight) <= 0:
            raise ValueError(
                f"masking.eos_weight={self.eos_weight}, masking.digit_weight={self.digit_weight}: need more than 0"
            )


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def batches_of_an_epoch(examples: list[Example], batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Index batches of similar length, each example once, batches in random order; an incomplete one is dropped."""
    noise = rng.random(len(examples))
    keys = [(len(e.solution) // 12, len(e.prompt) // 12, noise[i], i) for i, e in enumerate(examples)]
    order = np.array([k[-1] for k in sorted(keys)])
    count = len(order) // batch_size
    batches = list(order[: count * batch_size].reshape(count, batch_size))
    rng.shuffle(batches)
    return batches


def _padded(examples: list[Example], masking: Masking, response: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Clean ids (B, T) with prompts on the left, each row's left padding (B,), and the prompt region's length."""
    prompt_length = round_up(max(len(e.prompt) for e in examples), 8)
    clean = np.full((len(examples), prompt_length + response), masking.eos_id, dtype=np.int64)
    pad = np.array([prompt_length - len(e.prompt) for e in examples])
    for i, e in enumerate(examples):
        clean[i, pad[i] : prompt_length] = e.prompt
        clean[i, prompt_length : prompt_length + len(e.solution)] = e.solution
    return clean, pad, prompt_length


def _position_weights(targets: np.ndarray, counted: np.ndarray, masking: Masking) -> np.ndarray:
    """Weights (B, R) float32 of the counted targets: one row's sum to 1 / B."""
    w = np.where(targets == masking.eos_id, masking.eos_weight, 1.0)
    w = np.where(np.isin(targets, masking.digit_ids), masking.digit_weight, w) * counted
    return (w / w.sum(axis=1, keepdims=True) / len(w)).astype(np.float32)


def make_batch(
    examples: list[Example], masking: Masking, rng: np.random.Generator, ratio: float | None = None
) -> DenoisingBatch:
    """Pads, masks and weighs `examples`; the response region is as long as the longest, or all of `gen_length`.

    `ratio` fixes t for all rows; by default it is drawn.
    """
    m = masking
    longest = max(len(e.solution) for e in examples) + 1
    response = m.gen_length if rng.random() < m.full_tail else min(m.gen_length, round_up(longest, 16))
    rows = len(examples)
    clean, pad, prompt_length = _padded(examples, m, response)

    # t is stratified over the batch: one draw in each of `rows` equal intervals of (0, 1].
    t = np.full(rows, ratio) if ratio else (rng.permutation(rows) + 1 - rng.random(rows)) / rows
    masked = rng.random((rows, response)) < t[:, None]
    counted = np.ones_like(masked)
    where = np.arange(response)
    for i in np.flatnonzero(rng.random(rows) < m.blockwise):
        start = rng.integers(0, min(response, len(examples[i].solution) + 1))
        stop = start + m.block_length
        masked[i] = np.where(where < start, False, np.where(where < stop, masked[i], True))
        masked[i, start] = True
        counted[i] = where < stop
    empty = np.flatnonzero(~masked.any(axis=1))
    masked[empty, rng.integers(0, response, len(empty))] = True

    noisy = clean.copy()
    noisy[:, prompt_length:][masked] = m.mask_id
    weight = np.zeros(clean.shape, dtype=np.float32)
    weight[:, prompt_length:] = _position_weights(clean[:, prompt_length:], masked & counted, m)
    where = np.arange(clean.shape[1])
    position = np.maximum(where - pad[:, None], 0)
    attend = np.broadcast_to((where >= pad[:, None])[:, None, :], (rows, len(where), len(where)))
    return DenoisingBatch(*(torch.tensor(a) for a in (clean, noisy, weight, position, attend)))


# By how many positions an order of unmasking strays from left to right; one is drawn for each row.
ORDER_NOISE = (0, 4, 8, 16, 32)
LATE_DIGITS = 8  # in half of the rows digits come this many positions later, as decoding by confidence leaves them
TOGETHER = (1, 1, 2, 4, 8, 16, 32)  # how many tokens share a place in the order; one is drawn for each row


def two_stream_batch(
    examples: list[Example], masking: Masking, rng: np.random.Generator, in_order: bool = False
) -> DenoisingBatch:
    """Every response token is predicted in one forward, each from the tokens that precede it in a drawn order.

    The two streams of XLNet (Yang et al., 2019, sec. 2.3) without its shift: behind prompt and clean response stands
    a second response of masks at the same positions. Tokens are taken in groups. A clean token sees the prompt and
    the groups up to its own; a mask sees the prompt, the clean tokens of the groups before its own, and the masks of
    its own group. So each mask is asked what a masked diffusion LM is asked when the groups before it are unmasked,
    only without the masks of later groups in sight.
    `noisy_BT` and `clean_BT` have the prompt region, the response region, and the masks that are asked for, which
    alone have losses: all of the response, or what the examples count. `in_order` takes tokens one by one from left to
    right instead of drawing an order.
    """
    m = masking
    rows = len(examples)
    response = min(m.gen_length, round_up(max(len(e.solution) for e in examples) + 1, 8))
    clean, pad, prompt_length = _padded(examples, m, response)
    targets = clean[:, prompt_length:]
    noise = rng.choice(ORDER_NOISE, size=(rows, 1))
    late = LATE_DIGITS * np.isin(targets, m.digit_ids) * (rng.random((rows, 1)) < 0.5)
    key = np.arange(response) + noise * rng.random((rows, response)) + late
    rank = key.argsort(axis=1, kind="stable").argsort(axis=1)
    group = rank // rng.choice(TOGETHER, size=(rows, 1))
    if in_order:
        group = np.broadcast_to(np.arange(response), (rows, response))

    # (B, K) response positions with a mask in the second stream, and which of them are real.
    counted = np.ones((rows, response), dtype=bool)
    for i, e in enumerate(examples):
        if e.counted is not None:
            counted[i] = np.pad(e.counted, (0, response - len(e.counted)))
    asked = np.argsort(~counted, axis=1, kind="stable")[:, : counted.sum(axis=1).max()]
    real = np.take_along_axis(counted, asked, axis=1)
    asked_group = np.where(real, np.take_along_axis(group, asked, axis=1), -1)

    length = prompt_length + response + asked.shape[1]
    attend = np.zeros((rows, length, length), dtype=bool)
    attend[:, :, :prompt_length] = (np.arange(prompt_length) >= pad[:, None])[:, None, :]
    first, second = slice(prompt_length, prompt_length + response), slice(prompt_length + response, length)
    attend[:, first, first] = group[:, None, :] <= group[:, :, None]
    attend[:, second, first] = group[:, None, :] < asked_group[:, :, None]
    attend[:, second, second] = asked_group[:, None, :] == asked_group[:, :, None]

    targets = np.take_along_axis(targets, asked, axis=1)
    noisy = np.concatenate([clean, np.full_like(targets, m.mask_id)], axis=1)
    weight = np.zeros(noisy.shape, dtype=np.float32)
    weight[:, second] = _position_weights(targets, real, m)
    position = np.maximum(np.arange(prompt_length + response) - pad[:, None], 0)
    position = np.concatenate([position, np.take_along_axis(position[:, first], asked, axis=1)], axis=1)
    clean = np.concatenate([clean, targets], axis=1)
    return DenoisingBatch(*(torch.from_numpy(a) for a in (clean, noisy, weight, position, attend)))


@dataclass(frozen=True)
class Mixture:
    """Shares of the batches that are `drills` and `sums` instead of word problems; `source` draws them."""

    source: Drills | None = None
    drills: float = 0.0
    sums: float = 0.0

    def __post_init__(self):
        if min(self.drills, self.sums) < 0 or self.drills + self.sums > 1:
            raise ValueError(f"data.drills={self.drills}, data.sums={self.sums}: need shares that add up to at most 1")

    def make(self, problems: list[Example], masking: Masking, rng: np.random.Generator) -> DenoisingBatch:
        """One batch, of `problems` or of as many exercises; sums are twice as many, being short."""
        two_stream, kind = rng.random() < masking.two_stream, rng.random()
        if kind < self.sums:
            sums = [Example(*self.source.draw_sums(rng)) for _ in range(2 * len(problems))]
            return two_stream_batch(sums, masking, rng)
        if kind < self.sums + self.drills:
            problems = [Example(*self.source.draw(rng)) for _ in problems]
        return (two_stream_batch if two_stream else make_batch)(problems, masking, rng)


class DenoisingBatches(torch.utils.data.IterableDataset):
    """Endless batches, epoch after epoch; batch `n` is a function of the seed and `n` alone, so a run resumes exactly.

    `first` is the number of batches already consumed.
    """

    def __init__(
        self,
        examples: list[Example],
        masking: Masking,
        batch_size: int,
        seed: int,
        first: int = 0,
        mixture: Mixture | None = None,
    ):
        self.examples, self.masking, self.mixture = examples, masking, mixture or Mixture()
        self.batch_size, self.seed, self.first = batch_size, seed, first

    def __iter__(self) -> Iterator[DenoisingBatch]:
        per_epoch = len(self.examples) // self.batch_size
        n = self.first
        while True:
            epoch = n // per_epoch
            order = batches_of_an_epoch(self.examples, self.batch_size, np.random.default_rng((self.seed, epoch)))
            for indices in order[n % per_epoch :]:
                rng = np.random.default_rng((self.seed, 1, n))
                yield self.mixture.make([self.examples[i] for i in indices], self.masking, rng)
                n += 1
