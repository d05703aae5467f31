"""Tokenised problems, length-bucketed batches and the masking of LLaDA's SFT objective."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One tokenised problem: chat-formatted prompt and solution ids without EOS."""

    prompt: np.ndarray
    solution: np.ndarray


class DenoisingBatch(NamedTuple):
    """A padded batch, prompts on the left so that responses line up.

    Shapes: `clean_BT` and `noisy_BT` (B, T) int64; `pad_B` (B,) int64, left padding of each row; `loss_BT` (B, T)
    float32, the weight of each position's cross-entropy, zero where nothing is masked.
    """

    clean_BT: Tensor
    noisy_BT: Tensor
    pad_B: Tensor
    loss_BT: Tensor


@dataclass(frozen=True)
class Masking:
    """How responses are masked and how positions weigh.

    LLaDA masks every response token, EOS padding included, with probability t ~ U(0, 1] (`uniform`). A share of rows
    is masked as decoding meets it (`blockwise`): a clean prefix, one block at ratio t, all masks behind it; there only
    the block's positions have a loss.
    A row's loss is divided by its weighted number of masked tokens, which has far less variance than 1/t.
    """

    gen_length: int
    block_length: int
    blockwise: float
    full_tail: float
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


def make_batch(
    examples: list[Example], masking: Masking, rng: np.random.Generator, ratio: float | None = None
) -> DenoisingBatch:
    """Pads, masks and weighs `examples`; the response region is as long as the longest, or all of `gen_length`.

    `ratio` fixes t for all rows; by default it is drawn.
    """
    m = masking
    prompt_length = round_up(max(len(e.prompt) for e in examples), 8)
    longest = max(len(e.solution) for e in examples) + 1
    response = m.gen_length if rng.random() < m.full_tail else min(m.gen_length, round_up(longest, 16))
    rows = len(examples)
    clean = np.full((rows, prompt_length + response), m.eos_id, dtype=np.int64)
    pad = np.empty(rows, dtype=np.int64)
    for i, e in enumerate(examples):
        pad[i] = prompt_length - len(e.prompt)
        clean[i, pad[i] : prompt_length] = e.prompt
        clean[i, prompt_length : prompt_length + len(e.solution)] = e.solution

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
    targets = clean[:, prompt_length:]
    w = np.where(targets == m.eos_id, m.eos_weight, 1.0)
    w = np.where(np.isin(targets, m.digit_ids), m.digit_weight, w) * (masked & counted)
    weight[:, prompt_length:] = w / w.sum(axis=1, keepdims=True) / rows
    return DenoisingBatch(*(torch.from_numpy(a) for a in (clean, noisy, pad, weight)))


class DenoisingBatches(torch.utils.data.IterableDataset):
    """Endless batches, epoch after epoch; batch `n` is a function of the seed and `n` alone, so a run resumes exactly.

    `first` is the number of batches already consumed.
    """

    def __init__(self, examples: list[Example], masking: Masking, batch_size: int, seed: int, first: int = 0):
        self.examples, self.masking = examples, masking
        self.batch_size, self.seed, self.first = batch_size, seed, first

    def __iter__(self) -> Iterator[DenoisingBatch]:
        per_epoch = len(self.examples) // self.batch_size
        n = self.first
        while True:
            epoch = n // per_epoch
            order = batches_of_an_epoch(self.examples, self.batch_size, np.random.default_rng((self.seed, epoch)))
            for indices in order[n % per_epoch :]:
                rng = np.random.default_rng((self.seed, 1, n))
                yield make_batch([self.examples[i] for i in indices], self.masking, rng)
                n += 1
