"""Masked-diffusion models whose modelling code lies in their checkpoint. Off unless asked for.

Everything else here loads weights into transformers' own classes and runs no code of a checkpoint. This adapter does
run it, with the rights of whoever started the program, and so only where `trust_remote_code=true` says that the code
has been read. The code must lie in the checkpoint's own folder, and weights must be safetensors. Code written for
another version of transformers may fail under the one here; the error then names both.

Of the model it asks nothing but `model(input_ids).logits`, (B, S, V), with bidirectional attention: what its code
takes for a mask or for position ids is not known. So a batch of unequal prompts is not padded at all: the rows of one
prompt length are a forward of their own, without padding, which is exact for whatever model. Batches of one prompt
length cost nothing more; in others a step takes as many forwards of the model as there are lengths. Logits are
computed at every position and those not asked for dropped.
"""

import hashlib
import json
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from backbones.base import Sizes
from backbones.checkpoint import fingerprint, tensors
from backbones.denoiser import predicting
from backbones.hub import find_checkpoint
from backbones.loading import read_config
from backbones.packing import positions
from backbones.placement import DTYPES, check_dtype, place
from backbones.text import TextBackbone, check_vocabulary

MODEL_CLASSES = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM")
LENGTH_FIELDS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions")


class RemoteBackbone(TextBackbone):
    """`backbones.base.Backbone` over any `model` with `model(input_ids).logits`; no caches.

    `shifted`: the logits at position i - 1 predict position i. The other settings are `TextBackbone`'s.
    """

    why_no_cache = "its own modelling code takes none that is known here"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, shifted: bool, **settings):
        super().__init__(tokenizer, **settings)
        self.model, self.shifted = model.eval().requires_grad_(False), shifted

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @torch.inference_mode()
    def logits(self, tokens_BT: Tensor, pad_B: Tensor, asked_BT: Tensor, sizes: Sizes | None = None) -> Tensor:
        sizes = sizes or Sizes.of(pad_B, asked_BT)
        row_N, column_N = predicting(asked_BT, pad_B, self.shifted, sum(sizes.asked))
        logits_NV = None
        for pad in sorted(set(sizes.pads)):
            asked = [n for n, its_pad in zip(sizes.asked, sizes.pads, strict=True) if its_pad == pad]
            rows_B = pad_B == pad
            (rows_R,), (at_N,) = positions(rows_B, len(asked)), positions(rows_B[row_N], sum(asked))
            row_M, column_M = (rows_B.cumsum(dim=0) - 1)[row_N[at_N]], column_N[at_N] - pad
            part_MV = self.model(tokens_BT[rows_R, pad:]).logits[row_M, column_M]
            if logits_NV is None:
                logits_NV = part_MV.new_empty(len(row_N), part_MV.shape[1])
            logits_NV[at_N] = part_MV
        return logits_NV


def load_remote(
    path: str,
    *,
    name: str,
    trust_remote_code: bool = False,
    model_class: str = "AutoModel",
    shifted: bool = False,
    mask_token_id: int | None = None,
    eos_token_id: int | None = None,
    max_length: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    chat_template: bool | None = None,
) -> RemoteBackbone:
    """A checkpoint with modelling code of its own: a folder (relative: the working directory, then the repository) or
    a hub id.

    `mask_token_id`, `eos_token_id` and `max_length` may be left to the checkpoint. ValueError, before any code of it
    runs: no opt-in, no code, an id that is missing or contradicts the checkpoint's; and after it: missing tensors, no
    logits, a model that looks to the left alone.
    """
    if trust_remote_code is not True:
        raise ValueError(
            f"backbone.trust_remote_code={trust_remote_code}: the code in {path} would run here with your rights: it "
            "could read and send any file of yours. Read its *.py first, and pin them by backbone.revision or a folder "
            "of your own; then opt in with backbone.trust_remote_code=true"
        )
    check_dtype(dtype)
    if model_class not in MODEL_CLASSES:
        raise ValueError(f"backbone.model_class={model_class!r} is unknown; allowed: {', '.join(MODEL_CLASSES)}")
    folder = find_checkpoint(path, revision, with_code=True)
    config = read_config(folder)
    code = check_code(folder, config, model_class)
    length = choose_length(folder, config, max_length)
    device = place(folder, DTYPES[dtype], device, whole=True).first
    warnings.warn(
        f"backbone.trust_remote_code=true: {', '.join(f.name for f in code)} of {folder} runs now, with your rights",
        stacklevel=2,
    )
    with own_code(folder, config):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    mask_id = choose_id(folder, config, tokenizer, "mask_token_id", mask_token_id)
    eos_id = choose_id(folder, config, tokenizer, "eos_token_id", eos_token_id)
    if mask_id == eos_id:
        raise ValueError(f"backbone.mask_token_id={mask_id} is eos_token_id as well, in {folder}; give the right ones")
    model = load_model(folder, config, model_class, DTYPES[dtype], device)
    width = probe(folder, config, model, model_class, mask_id, eos_id)
    check_vocabulary(folder, tokenizer, width)
    return RemoteBackbone(
        model,
        tokenizer,
        shifted=shifted,
        name=name,
        mask_id=mask_id,
        eos_id=eos_id,
        max_length=length,
        weights_hash=remote_hash(folder, code, model_class, shifted),
        vocab_size=width,
        device=device,
        dtype=DTYPES[dtype],
        chat_template=chat_template,
    )


def check_code(folder: Path, config: dict[str, Any], model_class: str) -> list[Path]:
    """The *.py of the folder, sorted; ValueError where `model_class` has no code there, or it lies elsewhere."""
    sources = config.get("auto_map") or {}
    if model_class not in sources:
        raise ValueError(
            f"backbone.model_class={model_class}: config.json of {folder} has no code for it (its auto_map: "
            f"{', '.join(sources) or 'none'}); give one of those, or for a LLaDA or Dream the backbone of its own"
        )
    tokenizer = folder / "tokenizer_config.json"
    named = [sources, json.loads(tokenizer.read_text()).get("auto_map") if tokenizer.is_file() else None]
    if "--" in json.dumps(named):
        raise ValueError(
            f"backbone.path={folder}: its code lies in another repository ({named}); copy it into this one"
        )
    code = sorted(folder.glob("*.py"))
    if not code:
        raise ValueError(f"backbone.path={folder}: auto_map names {sources[model_class]}, but no *.py is there")
    return code


def choose_id(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, field: str, given: int | None
) -> int:
    """The id of `field`: what config.json and the tokenizer say, or `given` where they say nothing or differ.

    ValueError: nobody says it, they differ and nothing is given, or `given` is none of theirs.
    """
    if given is not None and (not isinstance(given, int) or given < 0):
        raise ValueError(f"backbone.{field}={given}: need an id of the vocabulary")
    said = {"config.json": config.get(field), "the tokenizer": getattr(tokenizer, field, None)}
    said = {who: value for who, value in said.items() if isinstance(value, int)}
    listed = ", ".join(f"{who} {value}" for who, value in said.items()) or "neither config.json nor the tokenizer"
    if given is None and len(set(said.values())) == 1:
        return next(iter(said.values()))
    if given is None:
        raise ValueError(f"backbone.{field}: {listed} of {folder} settles it; give backbone.{field}=…")
    if said and given not in said.values():
        raise ValueError(f"backbone.{field}={given} contradicts {folder}: {listed}; leave it out or give one of these")
    return given


def choose_length(folder: Path, config: dict[str, Any], given: int | None) -> int:
    """Longest prompt plus generation: `given`, no more than config.json allows, or what that says."""
    said = next((config[f] for f in LENGTH_FIELDS if isinstance(config.get(f), int)), None)
    if given is None and said is None:
        raise ValueError(f"backbone.max_length: config.json of {folder} names no length; give backbone.max_length=…")
    if given is not None and not 2 <= given <= (said or given):
        raise ValueError(f"backbone.max_length={given}: need 2 to {said} for {folder}")
    return said if given is None else given


@contextmanager
def own_code(folder: Path, config: dict[str, Any]):
    """Around what runs code of the checkpoint: whatever it raises becomes a ValueError that names the versions."""
    try:
        yield
    except Exception as error:
        written_for = config.get("transformers_version", "?")
        raise ValueError(
            f"backbone.path={folder}: its own code, written for transformers {written_for}, fails under "
            f"{transformers.__version__}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def defaults(dtype: torch.dtype, device: torch.device):
    """New tensors get `dtype` and `device` where the code that makes them names none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def load_model(
    folder: Path, config: dict[str, Any], model_class: str, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model as its own code builds it, with the stored tensors copied in one by one.

    Not by transformers' `from_pretrained`: that one's conventions change with its version, and code written for
    version 4 does not survive it. ValueError where a tensor is not stored, which would stay random.
    """
    with own_code(folder, config), defaults(dtype, device):
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
        source = config["auto_map"][model_class]
        model = get_class_from_dynamic_module(source, str(folder), local_files_only=True)(settings)
    state = model.state_dict()
    left = set(state)
    for name, tensor in tensors(folder):
        if name in state and state[name].shape == tensor.shape:
            with torch.no_grad():
                state[name].copy_(tensor)
            left.discard(name)
    # A tied matrix is stored once: it was read if another name for the same memory was.
    read = {state[name].data_ptr() for name in set(state) - left}
    absent = sorted(name for name in left if state[name].data_ptr() not in read)
    tied = getattr(settings, "tie_word_embeddings", False)
    if tied and [state[name].data_ptr() for name in absent] == [head_pointer(model)]:
        model.get_output_embeddings().weight, absent = model.get_input_embeddings().weight, []
    if absent:
        raise ValueError(
            f"backbone.path={folder}: tensors are missing or of another shape: {absent[:5]}; is "
            f"backbone.model_class={model_class} the right one?"
        )
    model.config.use_cache = False  # its own cache would only take memory; version 4 always had the field
    return model.to(device)


def head_pointer(model: PreTrainedModel) -> int | None:
    """Where the output matrix lies, if the model says that it has one."""
    head = model.get_output_embeddings()
    return None if head is None else head.weight.data_ptr()


@torch.inference_mode()
def probe(
    folder: Path, config: dict[str, Any], model: PreTrainedModel, model_class: str, mask_id: int, eos_id: int
) -> int:
    """The width of the logits. ValueError: there are none, an id is beyond the vocabulary, or attention is causal."""
    rows = torch.full((2, 4), eos_id, device=model.device)
    rows[:, 1] = mask_id
    rows[1, 3] = mask_id
    highest, size = max(mask_id, eos_id), model.get_input_embeddings().weight.shape[0]
    if highest >= size:
        raise ValueError(f"backbone.path={folder}: id {highest} is outside the vocabulary of {size}")
    with own_code(folder, config):
        logits = getattr(model(rows), "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != rows.shape:
        raise ValueError(
            f"backbone.model_class={model_class}: the model of {folder} gives no logits for every position; try "
            f"another: {', '.join(MODEL_CLASSES)}"
        )
    if not bool(logits.isfinite().all()):
        raise ValueError(f"backbone.path={folder}: its logits are not finite; try backbone.dtype=float32")
    if torch.equal(logits[0, 1], logits[1, 1]):
        raise ValueError(
            f"backbone.path={folder}: a token changes nothing to its left, so this is no masked-diffusion model: its "
            "attention is causal"
        )
    return logits.shape[2]


def remote_hash(folder: Path, code: list[Path], model_class: str, shifted: bool) -> str:
    """16 hex digits over all that decides the logits: the stored weights, the code, its class, and the shift."""
    digest = hashlib.sha256(json.dumps([fingerprint(folder), model_class, shifted]).encode())
    for file in code:
        digest.update(hashlib.sha256(file.name.encode() + b"\0" + file.read_bytes()).digest())
    return digest.hexdigest()[:16]
