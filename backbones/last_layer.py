"""The last decoder layer at some positions alone.

What a position's output needs of the others is their keys and values, and those the last layer takes from the layer
before it. So its queries, its MLP and the final norm run at the positions somebody reads; their outputs are the same.

Shape legend: B rows, T positions computed, K of them read.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class LastLayer:
    """Narrows the last layer of a Llama-like `model` (Llama, Qwen2) in the forwards made through `run`."""

    def __init__(self, model: PreTrainedModel):
        self.trunk = model.model
        self._read_BK: Tensor | None = None
        self.trunk.layers[-1].register_forward_pre_hook(self._narrow, with_kwargs=True)

    def run(self, read_BK: Tensor | None, **inputs) -> Tensor:
        """The trunk's last hidden states (B, K, d) at columns `read_BK` (int64) of its T; None: (B, T, d) at all."""
        self._read_BK = read_BK
        try:
            return self.trunk(**inputs).last_hidden_state
        finally:
            self._read_BK = None

    def _narrow(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._read_BK is None:
            return None
        (hidden_BTd,) = args
        read_BK = self._read_BK.to(hidden_BTd.device)
        cos_BTh, sin_BTh = kwargs["position_embeddings"]
        attention, mask, cache = layer.self_attn, kwargs["attention_mask"], kwargs["cache"]

        normed_BTd = layer.input_layernorm(hidden_BTd)
        heads = (*normed_BTd.shape[:2], -1, attention.head_dim)
        key_BHTh = attention.k_proj(normed_BTd).view(heads).transpose(1, 2)
        value_BHTh = attention.v_proj(normed_BTd).view(heads).transpose(1, 2)
        _, key_BHTh = apply_rotary_pos_emb(key_BHTh, key_BHTh, cos_BTh, sin_BTh)
        if cache is not None:
            key_BHTh, value_BHTh = cache.update(key_BHTh, value_BHTh, attention.layer_idx)

        kwargs = {
            **kwargs,
            "position_embeddings": (_columns(cos_BTh, read_BK), _columns(sin_BTh, read_BK)),
            # Every query of a row sees the same keys.
            "attention_mask": None if mask is None else mask[:, :, :1].expand(-1, -1, read_BK.shape[1], -1),
            "cache": _Given(key_BHTh, value_BHTh),
        }
        return (_columns(hidden_BTd, read_BK),), kwargs


class _Given:
    """Stands for the cache in the narrowed layer: its keys and values are those of all positions, already made."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def update(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def _columns(x_BTd: Tensor, read_BK: Tensor) -> Tensor:
    """`x_BTd` at `read_BK`; its first dimension may be 1 for all rows."""
    x_BTd = x_BTd.expand(read_BK.shape[0], -1, -1)
    return x_BTd.gather(1, read_BK[:, :, None].expand(-1, -1, x_BTd.shape[2]))
