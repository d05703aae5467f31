"""What a step computes and reads, settled before its forward, with all that the host has to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from infer.observation import Known


@dataclass(frozen=True)
class Plan:
    """One step of a batch. What is of the host came with one look, together with how the step before ended.

    Attributes:
        forming_B: bool, rows whose block is formed from what the step observes.
        asked_BL, asked_BT: bool, the positions whose logits are read, and their columns.
        refill_B: bool, rows that compute every position anew; None where no row keeps any (no cache).
        compute_BT: bool, the columns that are computed; None where all are.
        done: rows without a mask left.
        refilling: `refill_B` on the host.
        computed: how many columns each row computes; empty where all.
        known: the rest that the host knows.
    """

    forming_B: Tensor
    asked_BL: Tensor
    asked_BT: Tensor
    refill_B: Tensor | None
    compute_BT: Tensor | None
    done: Sequence[bool]
    refilling: Sequence[bool]
    computed: Sequence[int]
    known: Known


def look(**tensors: Tensor | None) -> dict[str, list[int]]:
    """The values of bool and int64 tensors of any shape as flat lists, by one transfer; of a None an empty one."""
    there = [tensor.reshape(-1) for tensor in tensors.values() if tensor is not None]
    values = iter(torch.cat(there).tolist())
    return {name: [] if tensor is None else list(islice(values, tensor.numel())) for name, tensor in tensors.items()}
