"""Keys and values of a batch of rows, written by absolute position.

A bidirectional denoiser changes what a position's keys and values are whenever any token changes, so a cache holds
values that were right at some earlier forward. Which positions are computed anew is the caller's policy
(`infer/cache.py`); this keeps the rest. Positions count from a row's first real token, so the padding that a row
shares its batch with may change without touching the cache.

Shape legend: B rows, R rows of one forward, K positions computed in it, S positions a row can have, H key heads.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from backbones.packing import positions


class _Layer(CacheLayerMixin):
    """One layer's keys and values, (B, H, S, d), behind transformers' cache interface."""

    def __init__(self, owner: "IndexedCache"):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self.owner.rows, self.owner.length
        self.keys = key_states.new_zeros(rows, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes (R, H, K, d) at the owner's target, returns all keys and values (R, H, S, d) of its rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        row_N, position_N, r_N, k_N, rows_R = self.owner.target(key_states.device)
        self.keys[row_N, :, position_N] = key_states.transpose(1, 2)[r_N, k_N]
        self.values[row_N, :, position_N] = value_states.transpose(1, 2)[r_N, k_N]
        return (self.keys, self.values) if rows_R is None else (self.keys[rows_R], self.values[rows_R])

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length, 0


class IndexedCache(Cache):
    """Cache of `rows` rows of up to `length` positions in a model of `layers` layers."""

    def __init__(self, layers: int, rows: int, length: int):
        super().__init__(layers=[_Layer(self) for _ in range(layers)])
        self.rows, self.length = rows, length
        self._target: dict[torch.device, tuple[Tensor | None, ...]] = {}

    def aim(self, rows_R: Tensor, position_RK: Tensor, valid_RK: Tensor, count: int | None = None) -> None:
        """The next forward computes rows `rows_R` at `position_RK`; where `valid_RK` is False nothing is written.
        `count`: how often it is True, if known."""
        # As numbers, not as a mask: every layer indexes with them, and a mask is searched each time.
        r_N, k_N = positions(valid_RK, count)
        # All rows in order need no copy of what they attend to.
        shown_R = None if len(rows_R) == self.rows else rows_R
        self._target = {rows_R.device: (rows_R[r_N], position_RK[r_N, k_N], r_N, k_N, shown_R)}

    def target(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """Where the forward's keys go, for a layer on `device`: rows and positions here, rows and columns there, and
        the rows whose keys it attends to; None: all."""
        if device not in self._target:
            first = next(iter(self._target.values()))
            self._target[device] = tuple(None if x is None else x.to(device) for x in first)
        return self._target[device]

    def keep(self, rows: list[int]) -> None:
        """The given rows alone, in that order."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.rows = len(rows)

    def grow(self, rows: int, length: int) -> None:
        """Room for `rows` more rows at the end, and for `length` positions in each."""
        extra = max(0, length - self.length)
        for layer in self.layers:
            if layer.is_initialized:
                pad = (0, 0, 0, extra, 0, 0, 0, rows)
                layer.keys = torch.nn.functional.pad(layer.keys, pad)
                layer.values = torch.nn.functional.pad(layer.values, pad)
        self.rows, self.length = self.rows + rows, max(self.length, length)
