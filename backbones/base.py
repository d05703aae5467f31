"""What a backbone offers, whatever its architecture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sizes:
    """Numbers of a forward that the host needs: with them at hand it queues the forward without waiting for a GPU.

    Attributes:
        asked: positions asked for in each row of the forward.
        pads: columns of padding on the left of each row.
        computed: positions computed in each row; empty where all are.
    """

    asked: Sequence[int]
    pads: Sequence[int]
    computed: Sequence[int] = ()

    @classmethod
    def of(
        cls, pad_B: Tensor, asked_BT: Tensor, compute_BT: Tensor | None = None, rows_B: Tensor | None = None
    ) -> "Sizes":
        """Looked up, at once, for the rows in `rows_B` (None: all)."""
        parts = [asked_BT, pad_B[:, None]] if compute_BT is None else [asked_BT, pad_B[:, None], compute_BT]
        rows = torch.stack([part.sum(dim=1) for part in parts], dim=1)
        rows = (rows if rows_B is None else rows[rows_B]).tolist()
        return cls(*map(list, zip(*rows, strict=True)))


class Backbone(Protocol):
    """A frozen denoiser with its tokenizer.

    Attributes:
        name: short name for records.
        tokenizer: the checkpoint's.
        mask_id, eos_id: token ids.
        vocab_size: V, the width of its logits.
        forbidden_ids: (K,) int64, ids that are never a prediction: the mask and ids without a tokenizer entry.
        max_length: longest prompt plus generation.
        fingerprint: hash of the stored weights.
        chat: whether prompts go through the tokenizer's chat template.
        vocabulary: hash of the tokenizer's tokens and ids.
        device, dtype: where and in what precision it computes.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    mask_id: int
    eos_id: int
    vocab_size: int
    forbidden_ids: Tensor
    max_length: int
    fingerprint: str
    chat: bool
    vocabulary: str
    device: torch.device
    dtype: torch.dtype

    @property
    def embedding(self) -> Tensor:
        """The input embedding table, (V, d)."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a user prompt, in chat markup where the model has it."""

    def decode(self, ids: Tensor) -> str:
        """The text of generated ids up to the first EOS, special tokens left out."""

    def logits(self, tokens_BT: Tensor, pad_B: Tensor, asked_BT: Tensor, sizes: Sizes | None = None) -> Tensor:
        """Logits (N, V) at the N asked positions, row-major, in the model's dtype.

        `tokens_BT` int64; `pad_B` int64, columns of padding on the left of each row; `asked_BT` bool; `sizes` where the
        caller knows them. A row's logits do not depend on the other rows.
        """
