"""A backbone made of a transformers decoder run bidirectionally."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from backbones import dream, llada
from backbones.base import Sizes
from backbones.bidirectional import key_mask, padding_inputs
from backbones.checkpoint import fingerprint
from backbones.compiled import CompiledTrunk
from backbones.hub import find_checkpoint
from backbones.kv_cache import IndexedCache
from backbones.last_layer import LastLayer
from backbones.loading import read_config
from backbones.packing import pack_left, positions
from backbones.placement import DTYPES, Placement, check_dtype, place
from backbones.text import TextBackbone, check_vocabulary, read_tokenizer

ATTENTION = ("sdpa", "eager")


class TransformersBackbone(TextBackbone):
    """`backbones.base.Backbone` over a Llama-like `model` (`.model` the trunk, `.lm_head` the head).

    `shifted`: the hidden state at position i - 1 predicts position i, as in models made from autoregressive ones.
    `compile`: whole forwards run compiled, and there are no caches, whose steps differ in what they compute.
    `attention`: transformers' implementation of it. The other settings are `TextBackbone`'s.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        shifted: bool = False,
        compile: bool = False,
        attention: str = "sdpa",
        **settings,
    ):
        head = model.lm_head.weight
        model.set_attn_implementation(attention)
        self.additive = head.dtype if attention == "eager" else None
        super().__init__(tokenizer, vocab_size=head.shape[0], device=head.device, dtype=head.dtype, **settings)
        self.shifted, self.model = shifted, model.eval().requires_grad_(False)
        self._last, self._compiled = LastLayer(model), None
        if compile:
            self._compiled = CompiledTrunk(self.model.model, self.device, self.additive)
            self.new_cache, self.why_no_cache = None, "backbone.compile=true compiles whole forwards alone"

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    @torch.inference_mode()
    def logits(self, tokens_BT: Tensor, pad_B: Tensor, asked_BT: Tensor, sizes: Sizes | None = None) -> Tensor:
        sizes = sizes or Sizes.of(pad_B, asked_BT)
        row_N, column_N = predicting(asked_BT, pad_B, self.shifted, sum(sizes.asked))
        if self._compiled is not None:
            return self.model.lm_head(self._compiled(tokens_BT, pad_B)[row_N, column_N])
        read_BK, read_N = distinct(row_N, column_N, asked_BT, max(sizes.asked))
        inputs = padding_inputs(pad_B, tokens_BT.shape[1], any(sizes.pads), self.additive)
        hidden_BKd = self._last.run(read_BK, input_ids=tokens_BT, use_cache=False, **inputs)
        return self.model.lm_head(hidden_BKd[row_N, read_N])

    def new_cache(self, rows: int, length: int) -> IndexedCache:
        """An empty cache for `rows` rows of up to `length` real positions each."""
        return IndexedCache(self.model.config.num_hidden_layers, rows, length)

    def sources(self, asked_BT: Tensor, pad_B: Tensor) -> Tensor:
        """The positions (B, T) bool whose outputs predict the asked ones; a cached step has to compute them."""
        return ahead(asked_BT, pad_B) if self.shifted else asked_BT

    @torch.inference_mode()
    def cached_logits(
        self,
        tokens_BT: Tensor,
        pad_B: Tensor,
        asked_BT: Tensor,
        compute_BT: Tensor,
        rows_B: Tensor,
        cache: IndexedCache,
        sizes: Sizes | None = None,
    ) -> Tensor:
        """Logits at the asked positions of the rows in `rows_B` (bool), computing only `compute_BT` of them.

        `asked_BT` and its `sources` must lie within `compute_BT`. What is computed is written to the cache; everything
        else of those rows is read from it. The result is that of `logits` where every real position is computed.
        `sizes`, where the caller knows them, are of the rows in `rows_B`.
        """
        sizes = sizes or Sizes.of(pad_B, asked_BT, compute_BT, rows_B)
        (rows_R,) = positions(rows_B, len(sizes.asked))
        row_N, column_N = predicting(asked_BT & rows_B[:, None], pad_B, self.shifted, sum(sizes.asked))
        pad_R1 = pad_B[rows_R][:, None]
        column_RK, valid_RK = pack_left(compute_BT[rows_R], max(sizes.computed))
        position_RK = (column_RK - pad_R1).clamp_min(0)
        cache.aim(rows_R, position_RK, valid_RK, sum(sizes.computed))
        # Computed positions are packed in their order, rows in theirs.
        packed_N = compute_BT.cumsum(dim=1)[row_N, column_N] - 1
        real_RS = torch.arange(cache.length, device=pad_B.device) < tokens_BT.shape[1] - pad_R1
        row_N = (rows_B.cumsum(dim=0) - 1)[row_N]
        read_RM, read_N = distinct(row_N, packed_N, valid_RK, max(sizes.asked))
        hidden_RMd = self._last.run(
            read_RM,
            input_ids=tokens_BT[rows_R].gather(1, column_RK),
            position_ids=position_RK,
            attention_mask=key_mask(real_RS, column_RK.shape[1], self.additive),
            cache=cache,
            use_cache=True,
        )
        return self.model.lm_head(hidden_RMd[row_N, read_N])


def load_llada(path: str, **options) -> TransformersBackbone:
    """A LLaDA checkpoint: a folder (relative: the working directory, then the repository) or a hub id.

    Options: `name`, and where wanted `dtype`, `device` (see `backbones.placement.place`), `revision`, `compile`,
    `attention`, and `chat_template`: whether prompts go through the tokenizer's chat template; None: where it has one.
    """
    return _load(path, llada.load_model, PreTrainedTokenizerFast, "max_sequence_length", False, **options)


def load_dream(path: str, **options) -> TransformersBackbone:
    """A Dream or DiffuCoder checkpoint, as `load_llada`; its logits are shifted here, once."""
    return _load(path, dream.load_model, Qwen2Tokenizer, "max_position_embeddings", True, **options)


def _load(
    path: str,
    load_model: Callable[[Path, torch.dtype, Placement], PreTrainedModel],
    tokenizer_class: type[PreTrainedTokenizerBase],
    length_field: str,
    shifted: bool,
    *,
    name: str,
    dtype: str = "float32",
    device: str | Sequence[str] = "cpu",
    revision: str | None = None,
    compile: bool = False,
    attention: str = "sdpa",
    chat_template: bool | None = None,
) -> TransformersBackbone:
    folder = find_checkpoint(path, revision)
    check_dtype(dtype)
    check_attention(attention)
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, tokenizer_class)
    mask_id = special_id(folder, config, "mask_token_id")
    eos_id = special_id(folder, config, "eos_token_id")
    placement = place(folder, DTYPES[dtype], device)
    if compile and placement.spread:
        raise ValueError(
            "backbone.compile=true needs the model on one device; give one in backbone.device, or use false"
        )
    model = load_model(folder, DTYPES[dtype], placement)
    check_vocabulary(folder, tokenizer, model.lm_head.weight.shape[0])
    return TransformersBackbone(
        model,
        tokenizer,
        name=name,
        mask_id=mask_id,
        eos_id=eos_id,
        max_length=config[length_field],
        weights_hash=fingerprint(folder),
        shifted=shifted,
        compile=compile,
        attention=attention,
        chat_template=chat_template,
    )


def predicting(asked_BT: Tensor, pad_B: Tensor, shifted: bool, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Row and column (N,) of the outputs that predict the asked positions, in row-major order; `count` is N if known.

    `shifted`: position i - 1 predicts i. A row's first position has none before it and is predicted by its own, as in
    Dream's published sampler.
    """
    row_N, column_N = positions(asked_BT, count)
    return row_N, torch.maximum(column_N - 1, pad_B[row_N]) if shifted else column_N


def ahead(asked_BT: Tensor, pad_B: Tensor) -> Tensor:
    """What `predicting` finds in a shifted model, as (B, T) bool."""
    before_BT = torch.nn.functional.pad(asked_BT[:, 1:], (0, 1))
    column_T, pad_B1 = torch.arange(asked_BT.shape[1], device=pad_B.device), pad_B[:, None]
    return (before_BT & (column_T >= pad_B1)) | (asked_BT & (column_T == pad_B1))


def distinct(row_N: Tensor, column_N: Tensor, like_BT: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns (B, K) of each row that occur in (`row_N`, `column_N`), and where in K each of the N is found.

    K is `width`, at least the largest number in a row; rows with fewer get columns that nobody reads.
    """
    read_BT = torch.zeros_like(like_BT).index_put((row_N, column_N), like_BT.new_ones(()))
    return pack_left(read_BT, width)[0], (read_BT.cumsum(dim=1) - 1)[row_N, column_N]


def check_attention(attention: str) -> None:
    if attention not in ATTENTION:
        raise ValueError(
            f"backbone.attention={attention!r} is unknown; allowed: {', '.join(ATTENTION)}. Padded rows and caches "
            "need masks, which flash_attention_2 does not take; on a GPU sdpa runs flash kernels where no row is padded"
        )


def special_id(folder: Path, config: dict, field: str) -> int:
    """`config[field]`, checked against the vocabulary."""
    found = config.get(field)
    if not isinstance(found, int):
        raise ValueError(f"backbone.path={folder}: config.json has no {field}")
    size = config.get("embedding_size") or config.get("vocab_size", 0)
    if not 0 <= found < size:
        raise ValueError(f"backbone.path={folder}: {field}={found} is outside the vocabulary of {size}")
    return found
