"""A model's trunk compiled by `torch.compile`. Opt-in: compiling takes minutes and pays off on long runs.

Shapes are kept few, since each is compiled anew: a batch's length is rounded up to a multiple of `BUCKET` by padding on
the left, which changes nothing for a row, and is static; the number of rows, which falls as rows finish, is dynamic.
The attention mask is always there, so that a batch without padding is no variant of its own. torch keeps eight variants
(`torch._dynamo.config.recompile_limit`) and runs what comes after them uncompiled, with a warning.
"""

import os
import shutil

import torch
from torch import Tensor, nn

from backbones.bidirectional import padding_inputs

BUCKET = 64


class CompiledTrunk:
    """Hidden states as an uncompiled `trunk` gives them, up to rounding. `additive`: see `bidirectional.key_mask`."""

    def __init__(self, trunk: nn.Module, device: torch.device, additive: torch.dtype | None = None):
        check_compiler(device)
        self.trunk, self.additive = trunk, additive
        self._compiled = torch.compile(self._hidden)

    def _hidden(self, tokens_BT: Tensor, pad_B: Tensor) -> Tensor:
        inputs = padding_inputs(pad_B, tokens_BT.shape[1], padded=True, additive=self.additive)
        return self.trunk(input_ids=tokens_BT, use_cache=False, **inputs).last_hidden_state

    def __call__(self, tokens_BT: Tensor, pad_B: Tensor) -> Tensor:
        """Hidden states (B, T, d) of rows whose first `pad_B[b]` positions are padding."""
        extra = -tokens_BT.shape[1] % BUCKET
        tokens_BT, pad_B = nn.functional.pad(tokens_BT, (extra, 0)), pad_B + extra
        for tensor in (tokens_BT, pad_B):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tokens_BT, 1)
        return self._compiled(tokens_BT, pad_B)[:, extra:]


def check_compiler(device: torch.device) -> None:
    """ValueError where the CPU's kernels could not be compiled; for a GPU torch brings its own compiler along."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "cl"]
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise ValueError(f"backbone.compile=true needs a C++ compiler ({', '.join(names)}) for the CPU; use false")
