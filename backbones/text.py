"""The side of a backbone that faces text: its tokenizer, ids, and the vocabulary it may predict from."""

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class TextBackbone:
    """What every `backbones.base.Backbone` here shares, whatever computes its logits.

    `vocab_size`: width V of the logits; `weights_hash` becomes `fingerprint`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        mask_id: int,
        eos_id: int,
        max_length: int,
        weights_hash: str,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.tokenizer, self.name = tokenizer, name
        self.mask_id, self.eos_id, self.max_length, self.fingerprint = mask_id, eos_id, max_length, weights_hash
        self.vocab_size, self.device, self.dtype = vocab_size, device, dtype
        self.vocabulary = vocabulary_hash(tokenizer)
        unknown = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
        self.forbidden_ids = torch.tensor(sorted(unknown | {mask_id}), device=device)

    def encode(self, prompt: str) -> tuple[int, ...]:
        if not self.tokenizer.chat_template:
            return tuple(self.tokenizer(prompt).input_ids)
        messages = [{"role": "user", "content": prompt}]
        return tuple(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, ids: Tensor) -> str:
        ids = ids.tolist()
        if self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def check_vocabulary(folder, tokenizer: PreTrainedTokenizerBase, width: int) -> None:
    """ValueError where the tokenizer has ids beyond the `width` of the model."""
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if entries > width:
        raise ValueError(f"backbone.path={folder}: the tokenizer has {entries} ids, the model only {width}")
