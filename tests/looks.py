"""Counts what would make the host wait for a GPU."""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode

WAITING = {
    "__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "numpy", "nonzero", "argwhere",
    "masked_select", "unique", "equal", "allclose",
}  # fmt: skip


class Looks(TorchFunctionMode):
    """Counts calls that need a tensor's values on the host: reading one, or an index whose length depends on values."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if name in WAITING or (name in ("__getitem__", "__setitem__") and is_mask(args[1])):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def is_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
