"""The side of a backbone that faces text: its tokenizer, ids, and the vocabulary it may predict from."""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class TextBackbone:
    """What every `backbones.base.Backbone` here shares, whatever computes its logits.

    `vocab_size`: width V of the logits; `weights_hash` becomes `fingerprint`; `chat_template`:
    whether prompts go through the tokenizer's, None: where it has one.
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
        chat_template: bool | None = None,
    ):
        self.tokenizer, self.name = tokenizer, name
        self.mask_id, self.eos_id, self.max_length, self.fingerprint = mask_id, eos_id, max_length, weights_hash
        self.vocab_size, self.device, self.dtype = vocab_size, device, dtype
        self.chat = uses_chat(tokenizer, chat_template)
        self.vocabulary = vocabulary_hash(tokenizer)
        unknown = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
        self.forbidden_ids = torch.tensor(sorted(unknown | {mask_id}), device=device)

    def encode(self, prompt: str) -> tuple[int, ...]:
        if not self.chat:
            return tuple(self.tokenizer(prompt).input_ids)
        messages = [{"role": "user", "content": prompt}]
        return tuple(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def decode(self, ids: Tensor) -> str:
        ids = ids.tolist()
        if self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_tokenizer(folder: Path, tokenizer_class: type[PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ValueError where it has none that can be read."""
    try:
        return tokenizer_class.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"backbone.path={folder}: its tokenizer cannot be read (tokenizer.json, or vocab.json and merges.txt, with "
            f"tokenizer_config.json): {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat_template: bool | None) -> bool:
    """Whether prompts go through the tokenizer's chat template; ValueError where it is asked for and has none."""
    if chat_template and not tokenizer.chat_template:
        raise ValueError(
            "backbone.chat_template=true: the checkpoint's tokenizer has no chat template; set it to false"
        )
    return bool(tokenizer.chat_template) if chat_template is None else chat_template


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def check_vocabulary(folder, tokenizer: PreTrainedTokenizerBase, width: int) -> None:
    """ValueError where the tokenizer has ids beyond the `width` of the model."""
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1
    if entries > width:
        raise ValueError(f"backbone.path={folder}: the tokenizer has {entries} ids, the model only {width}")
