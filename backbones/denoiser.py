"""A backbone made of a transformers decoder run bidirectionally."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from backbones import dream, llada
from backbones.bidirectional import padding_inputs
from backbones.checkpoint import fingerprint, headers
from backbones.compiled import CompiledTrunk
from backbones.hub import find_checkpoint
from backbones.kv_cache import IndexedCache
from backbones.last_layer import LastLayer
from backbones.loading import read_config
from backbones.packing import pack_left
from backbones.text import TextBackbone, check_vocabulary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersBackbone(TextBackbone):
    """`backbones.base.Backbone` over a Llama-like `model` (`.model` the trunk, `.lm_head` the head).

    `shifted`: the hidden state at position i - 1 predicts position i, as in models made from autoregressive ones.
    `compile`: whole forwards run compiled, and there are no caches, whose steps differ in what they compute.
    The other settings are `TextBackbone`'s.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        shifted: bool = False,
        compile: bool = False,
        **settings,
    ):
        head = model.lm_head.weight
        super().__init__(tokenizer, vocab_size=head.shape[0], device=head.device, dtype=head.dtype, **settings)
        self.shifted, self.model = shifted, model.eval().requires_grad_(False)
        self._last, self._compiled = LastLayer(model), None
        if compile:
            self._compiled = CompiledTrunk(self.model.model, self.device)
            self.new_cache, self.why_no_cache = None, "backbone.compile=true compiles whole forwards alone"

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight

    @torch.inference_mode()
    def logits(self, tokens_BT: Tensor, pad_B: Tensor, asked_BT: Tensor) -> Tensor:
        # Looked up before the trunk is queued: on a GPU the host waits here for little, and behind it for nothing.
        row_N, column_N = predicting(asked_BT, pad_B, self.shifted)
        if self._compiled is not None:
            return self.model.lm_head(self._compiled(tokens_BT, pad_B)[row_N, column_N])
        read_BK, read_N = distinct(row_N, column_N, asked_BT)
        inputs = padding_inputs(pad_B, tokens_BT.shape[1])
        hidden_BKd = self._last.run(read_BK, input_ids=tokens_BT, use_cache=False, **inputs)
        return self.model.lm_head(hidden_BKd[row_N, read_N])

    def new_cache(self, rows: int, length: int) -> IndexedCache:
        """An empty cache for `rows` rows of up to `length` real positions each."""
        return IndexedCache(self.model.config.num_hidden_layers, rows, length)

    @torch.inference_mode()
    def cached_logits(
        self,
        tokens_BT: Tensor,
        pad_B: Tensor,
        asked_BT: Tensor,
        compute_BT: Tensor,
        rows_B: Tensor,
        cache: IndexedCache,
    ) -> Tensor:
        """Logits at the asked positions of the rows in `rows_B` (bool), computing only `compute_BT` of them.

        `asked_BT` must lie within `compute_BT`. What is computed is written to the cache; everything else of those
        rows is read from it. The result is that of `logits` where every real position is computed.
        """
        rows_R = rows_B.nonzero()[:, 0]
        row_N, column_N = predicting(asked_BT & rows_B[:, None], pad_B, self.shifted)
        if self.shifted:
            compute_BT = compute_BT.index_put((row_N, column_N), compute_BT.new_ones(()))
        pad_R1 = pad_B[rows_R][:, None]
        column_RK, valid_RK = pack_left(compute_BT[rows_R])
        position_RK = (column_RK - pad_R1).clamp_min(0)
        cache.aim(rows_R, position_RK, valid_RK)
        # Computed positions are packed in their order, rows in theirs.
        packed_N = compute_BT.cumsum(dim=1)[row_N, column_N] - 1
        real_RS = torch.arange(cache.length, device=pad_B.device) < tokens_BT.shape[1] - pad_R1
        row_N = (rows_B.cumsum(dim=0) - 1)[row_N]
        read_RM, read_N = distinct(row_N, packed_N, valid_RK)
        hidden_RMd = self._last.run(
            read_RM,
            input_ids=tokens_BT[rows_R].gather(1, column_RK),
            position_ids=position_RK,
            attention_mask=real_RS[:, None, None, :].expand(-1, 1, column_RK.shape[1], -1),
            cache=cache,
            use_cache=True,
        )
        return self.model.lm_head(hidden_RMd[row_N, read_N])


def load_llada(path: str, **options) -> TransformersBackbone:
    """A LLaDA checkpoint: a folder (relative: the working directory, then the repository) or a hub id.

    Options: `name`, and where wanted `dtype`, `device`, `revision`, `compile`, and `chat_template`: whether prompts go
    through the tokenizer's chat template; None: where it has one.
    """
    return _load(path, llada.load_model, PreTrainedTokenizerFast, "max_sequence_length", False, **options)


def load_dream(path: str, **options) -> TransformersBackbone:
    """A Dream or DiffuCoder checkpoint, as `load_llada`; its logits are shifted here, once."""
    return _load(path, dream.load_model, Qwen2Tokenizer, "max_position_embeddings", True, **options)


def _load(
    path: str,
    load_model: Callable[[Path, torch.dtype, str], PreTrainedModel],
    tokenizer_class: type[PreTrainedTokenizerBase],
    length_field: str,
    shifted: bool,
    *,
    name: str,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    compile: bool = False,
    chat_template: bool | None = None,
) -> TransformersBackbone:
    folder = find_checkpoint(path, revision)
    check_dtype(dtype)
    config, device = read_config(folder), resolve_device(device)
    tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True)
    mask_id = special_id(folder, config, "mask_token_id")
    eos_id = special_id(folder, config, "eos_token_id")
    check_memory(folder, DTYPES[dtype], device)
    model = load_model(folder, DTYPES[dtype], device)
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
        chat_template=chat_template,
    )


def predicting(asked_BT: Tensor, pad_B: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """Row and column (N,) of the outputs that predict the asked positions, in row-major order.

    `shifted`: position i - 1 predicts i. A row's first position has none before it and is predicted by its own, as in
    Dream's published sampler.
    """
    row_N, column_N = asked_BT.nonzero(as_tuple=True)
    return row_N, torch.maximum(column_N - 1, pad_B[row_N]) if shifted else column_N


def distinct(row_N: Tensor, column_N: Tensor, like_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (B, K) of each row that occur in (`row_N`, `column_N`), and where in K each of the N is found.

    K is the largest number in a row; rows with fewer get columns that nobody reads.
    """
    read_BT = torch.zeros_like(like_BT).index_put((row_N, column_N), like_BT.new_ones((), dtype=torch.bool))
    return pack_left(read_BT)[0], (read_BT.cumsum(dim=1) - 1)[row_N, column_N]


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"backbone.dtype={dtype!r} is unknown; allowed: {', '.join(DTYPES)}")


def resolve_device(device: str) -> str:
    """`auto` is the GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def special_id(folder: Path, config: dict, field: str) -> int:
    """`config[field]`, checked against the vocabulary."""
    found = config.get(field)
    if not isinstance(found, int):
        raise ValueError(f"backbone.path={folder}: config.json has no {field}")
    size = config.get("embedding_size") or config["vocab_size"]
    if not 0 <= found < size:
        raise ValueError(f"backbone.path={folder}: {field}={found} is outside the vocabulary of {size}")
    return found


def check_memory(folder: Path, dtype: torch.dtype, device: str) -> None:
    """Refuses weights that cannot fit the device, before any is read."""
    numbers = sum(math.prod(shape) for shape, _ in headers(folder).values())
    needed = numbers * dtype.itemsize
    if str(device).startswith("cuda"):
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ValueError(
            f"backbone.path={folder}: {numbers:,} parameters in {str(dtype).removeprefix('torch.')} need "
            f"{needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free; try backbone.dtype=bfloat16 or "
            "another backbone.device"
        )
