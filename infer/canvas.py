"""The canvas: what is filled, what is masked, and when each token was committed.

Shape legend: B rows of the batch, P longest prompt, L generation length, T = P + L. Prompts stand on the left, padded
on their left, so that the last L columns are the generation region of every row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backbones.host import may_hold

STOPPED = -1  # committed_at of a position that no step committed: still masked, or filled by the stop rule


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Attributes:
        id: names the request in records and errors.
        prompt: token ids, chat markup included.
        reference: (L,) token ids that only the `oracle` rule reads.
    """

    id: str
    prompt: tuple[int, ...]
    reference: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        id: the request's.
        prompt: the request's token ids.
        tokens: (L,) int64 on the CPU, the whole generation region, EOS tail included.
        committed_at: (L,) int64, the step (from 0) that committed each token; `STOPPED` where the stop rule filled it.
        block: (L,) int64, number of the block in which each token was committed, `STOPPED` likewise.
        nfe: forwards this row took part in.
        latency_s: seconds from entering a slot to being finished.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: Tensor
    committed_at: Tensor
    block: Tensor
    nfe: int
    latency_s: float


def text_length(output: Sequence[int], eos_id: int) -> int:
    """Number of tokens before the first EOS, which is what is counted as generated; all where there is none."""
    output = list(output)
    return output.index(eos_id) if eos_id in output else len(output)


def generator_of(name: str) -> torch.Generator:
    """A generator that `name` alone seeds."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_lots(request_id: str, gen_length: int) -> Tensor:
    return torch.rand(gen_length, generator=generator_of(f"lots {request_id}"))


@dataclass
class Canvas:
    """The rows being decoded; the loop owns it, rules and observers only read it.

    Attributes:
        ids: B request ids.
        tokens_BT: int64, `mask_id` where masked, arbitrary in the padding.
        pad_B: int64, padding columns on the left of each row.
        masked_BL: bool, the generation positions still masked.
        block_BL: bool, the active block, committed members included.
        block_number_B: int64, how many blocks the row opened before the active one; -1 before the first.
        step_B: int64, forwards the row has had.
        block_step_B: int64, forwards the row has had since its active block was opened.
        lot_BL: float32 in [0, 1), a number drawn for each position from the request's id, for random orders.
        committed_at_BL, committed_block_BL: int64, see `Completion`.
        reference_BL: int64 or None.
    """

    ids: list[str]
    prompts: list[tuple[int, ...]]
    tokens_BT: Tensor
    pad_B: Tensor
    masked_BL: Tensor
    block_BL: Tensor
    block_number_B: Tensor
    step_B: Tensor
    block_step_B: Tensor
    lot_BL: Tensor
    committed_at_BL: Tensor
    committed_block_BL: Tensor
    reference_BL: Tensor | None
    mask_id: int
    eos_id: int

    @property
    def gen_length(self) -> int:
        return self.masked_BL.shape[1]

    @property
    def generation_BL(self) -> Tensor:
        """View of the generation region's token ids."""
        return self.tokens_BT[:, -self.gen_length :]

    @property
    def pads(self) -> list[int]:
        """`pad_B`, which the host knows from the prompts."""
        return [self.tokens_BT.shape[1] - self.gen_length - len(prompt) for prompt in self.prompts]

    @property
    def candidates_BL(self) -> Tensor:
        """Masked positions of the active block: what a commit rule may choose from."""
        return self.block_BL & self.masked_BL

    def columns(self, where_BL: Tensor) -> Tensor:
        """Positions (B, L) bool of the generation region as columns (B, T) of `tokens_BT`."""
        return torch.nn.functional.pad(where_BL, (self.tokens_BT.shape[1] - self.gen_length, 0))

    @classmethod
    def of(cls, requests: list[Request], gen_length: int, mask_id: int, eos_id: int, device) -> "Canvas":
        """A fresh canvas: every generation position masked, no block open."""
        rows, longest = len(requests), max(len(r.prompt) for r in requests)
        tokens = torch.full((rows, longest + gen_length), mask_id, dtype=torch.long)
        pad = torch.tensor([longest - len(r.prompt) for r in requests])
        for row, request in enumerate(requests):
            tokens[row, : pad[row]] = eos_id
            tokens[row, pad[row] : longest] = torch.tensor(request.prompt)
        with_reference = all(r.reference is not None for r in requests)
        shape = (rows, gen_length)
        return cls(
            ids=[r.id for r in requests],
            prompts=[r.prompt for r in requests],
            tokens_BT=tokens.to(device),
            pad_B=pad.to(device),
            masked_BL=torch.ones(shape, dtype=torch.bool, device=device),
            block_BL=torch.zeros(shape, dtype=torch.bool, device=device),
            block_number_B=torch.full((rows,), -1, device=device),
            step_B=torch.zeros(rows, dtype=torch.long, device=device),
            block_step_B=torch.zeros(rows, dtype=torch.long, device=device),
            lot_BL=torch.stack([draw_lots(r.id, gen_length) for r in requests]).to(device),
            committed_at_BL=torch.full(shape, STOPPED, device=device),
            committed_block_BL=torch.full(shape, STOPPED, device=device),
            reference_BL=torch.tensor([r.reference for r in requests], device=device) if with_reference else None,
            mask_id=mask_id,
            eos_id=eos_id,
        )

    def keep(self, rows: list[int]) -> "Canvas":
        """The given rows alone, without the padding that none of them needs."""
        index = torch.tensor(rows, device=self.pad_B.device)
        spare = min(self.pads[r] for r in rows)
        pick = {name: getattr(self, name)[index] for name in _ROW_TENSORS}
        pick["tokens_BT"] = pick["tokens_BT"][:, spare:]
        pick["pad_B"] = pick["pad_B"] - spare
        return Canvas(
            ids=[self.ids[r] for r in rows],
            prompts=[self.prompts[r] for r in rows],
            reference_BL=None if self.reference_BL is None else self.reference_BL[index],
            mask_id=self.mask_id,
            eos_id=self.eos_id,
            **pick,
        )

    def join(self, other: "Canvas") -> "Canvas":
        """Rows of `self`, then rows of `other`; the shorter prompts get more padding."""
        length = max(self.tokens_BT.shape[1], other.tokens_BT.shape[1])
        parts = []
        for canvas in (self, other):
            extra = length - canvas.tokens_BT.shape[1]
            part = {name: getattr(canvas, name) for name in _ROW_TENSORS}
            part["tokens_BT"] = torch.nn.functional.pad(canvas.tokens_BT, (extra, 0), value=canvas.eos_id)
            part["pad_B"] = canvas.pad_B + extra
            parts.append(part)
        references = [self.reference_BL, other.reference_BL]
        return Canvas(
            ids=self.ids + other.ids,
            prompts=self.prompts + other.prompts,
            reference_BL=None if any(r is None for r in references) else torch.cat(references),
            mask_id=self.mask_id,
            eos_id=self.eos_id,
            **{name: torch.cat([part[name] for part in parts]) for name in _ROW_TENSORS},
        )

    def open_blocks(self, rows_B: Tensor, block_BL: Tensor) -> None:
        """Replaces the active block of the rows in `rows_B` (bool) by theirs in `block_BL` (bool)."""
        self.block_BL = torch.where(rows_B[:, None], block_BL, self.block_BL)
        self.block_number_B = self.block_number_B + rows_B
        self.block_step_B = self.block_step_B.masked_fill(rows_B, 0)

    def commit(self, chosen_BL: Tensor, top1_BL: Tensor) -> None:
        """Writes `top1_BL` at the chosen positions and counts the step for every row."""
        assert may_hold((chosen_BL <= self.candidates_BL).all()), "a committed position is foreign or not masked"
        generation_BL = self.generation_BL
        generation_BL.copy_(torch.where(chosen_BL, top1_BL, generation_BL))
        self.committed_at_BL = torch.where(chosen_BL, self.step_B[:, None], self.committed_at_BL)
        self.committed_block_BL = torch.where(chosen_BL, self.block_number_B[:, None], self.committed_block_BL)
        self.masked_BL = self.masked_BL & ~chosen_BL
        self.step_B = self.step_B + 1
        self.block_step_B = self.block_step_B + 1

    def fill_with_eos(self, rows_B: Tensor) -> None:
        """Ends rows: what is still masked becomes EOS and costs no forward."""
        fill_BL = self.masked_BL & rows_B[:, None]
        generation_BL = self.generation_BL
        generation_BL.masked_fill_(fill_BL, self.eos_id)
        self.masked_BL = self.masked_BL & ~fill_BL


_ROW_TENSORS = (
    "tokens_BT",
    "pad_B",
    "masked_BL",
    "block_BL",
    "block_number_B",
    "step_B",
    "block_step_B",
    "lot_BL",
    "committed_at_BL",
    "committed_block_BL",
)
