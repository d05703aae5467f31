"""transformers' causal classes run as bidirectional denoisers on ragged, left-padded batches."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def make_bidirectional(model: PreTrainedModel) -> PreTrainedModel:
    """Lets every position of `model` attend to every other, in place.

    The config flag makes transformers build a bidirectional mask; the attention modules keep a flag of their own
    that sdpa reads where there is no mask at all.
    """
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def key_mask(real_BS: Tensor, queries: int, additive: torch.dtype | None = None) -> Tensor:
    """(B, 1, queries, S): every query of a row sees its real keys. A broadcast view of bool, as sdpa takes it;
    `additive`: of that dtype instead, to be added to scores, as eager attention does."""
    if additive is not None:
        real_BS = torch.zeros_like(real_BS, dtype=additive).masked_fill(~real_BS, torch.finfo(additive).min)
    return real_BS[:, None, None, :].expand(-1, 1, queries, -1)


def padding_inputs(pad_B: Tensor, length: int, padded: bool, additive: torch.dtype | None = None) -> dict[str, Tensor]:
    """Attention mask and position ids for rows whose first `pad_B[b]` positions are padding.

    Positions count from the first real token, so a row's rotary angles do not depend on what shares its batch.
    Returns `position_ids` (B, T) int64 and, only if `padded` (some row is), `attention_mask`, a `key_mask`.
    """
    positions_T = torch.arange(length, device=pad_B.device)
    real_BT = positions_T >= pad_B[:, None]
    inputs = {"position_ids": (positions_T - pad_B[:, None]).clamp_min(0)}
    if padded:
        inputs["attention_mask"] = key_mask(real_BT, length, additive)
    return inputs
