"""What a backbone offers, whatever its architecture."""

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


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

    def logits(self, tokens_BT: Tensor, pad_B: Tensor, asked_BT: Tensor) -> Tensor:
        """Logits (N, V) at the N asked positions, row-major, in the model's dtype.

        `tokens_BT` int64; `pad_B` int64, columns of padding on the left of each row; `asked_BT` bool. A row's logits
        do not depend on the other rows.
        """
