"""The observer that records a replay: what the denoiser predicted at every step, labelled once the row is finished."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.canvas import Canvas, Completion
from infer.observation import STATISTICS, Observation


@dataclass(frozen=True)
class Step:
    """One step of one row. Arrays run over the masked positions of the active block."""

    step: int
    block: int
    block_size: int
    columns: dict[str, np.ndarray]


def trajectory_row(index: int, completion: Completion) -> dict:
    """A row of `schema.TRAJECTORIES`."""
    return {
        "trajectory": index,
        "id": completion.id,
        "prompt": list(completion.prompt),
        "tokens": completion.tokens.tolist(),
        "committed_at": completion.committed_at.tolist(),
        "block": completion.block.tolist(),
        "nfe": completion.nfe,
    }


class Recorder:
    """Collects steps per request; `labelled` turns a finished one into rows of `schema.STEPS`.

    A step is put on its way to the host and looked at when the next one comes, so that a GPU is never waited for: by
    then a whole forward has passed.
    """

    needs = frozenset(STATISTICS)

    def __init__(self):
        self._steps: dict[str, list[Step]] = {}
        self._coming: tuple[list[str], dict[str, Tensor], torch.cuda.Event | None] | None = None

    def step(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> None:
        self._arrive()
        found = {name: getattr(seen, f"{name}_BL") for name in ("top1", *STATISTICS)}
        found |= {"rank": canvas.block_BL.cumsum(dim=1) - 1, "candidate": canvas.candidates_BL}
        found |= {"step": canvas.step_B, "block": canvas.block_number_B, "block_size": canvas.block_BL.sum(dim=1)}
        self._coming = (list(canvas.ids), *to_host(found))

    def finished(self, completion: Completion) -> None:
        pass

    def _arrive(self) -> None:
        if self._coming is None:
            return
        (ids, found, copied), self._coming = self._coming, None
        if copied is not None:
            copied.synchronize()
        array = {name: np.asarray(tensor) for name, tensor in found.items()}
        for row, request in enumerate(ids):
            position = np.flatnonzero(array["candidate"][row])
            columns = {name: array[name][row, position] for name in ("rank", "top1", *STATISTICS)}
            step, block, size = (int(array[name][row]) for name in ("step", "block", "block_size"))
            self._steps.setdefault(request, []).append(Step(step, block, size, {"position": position, **columns}))

    def labelled(self, index: int, completion: Completion) -> list[dict]:
        """Rows for trajectory `index`, in order of steps; forgets the trajectory."""
        self._arrive()
        final = completion.tokens.numpy()
        steps = self._steps.pop(completion.id)
        stays = np.ones(len(final), dtype=bool)
        rows = []
        for step in reversed(steps):
            position = step.columns["position"]
            right = step.columns["top1"] == final[position]
            # Stable: right now, and at every later step at which the position was still masked.
            stays[position] &= right
            rows.append(
                {
                    "trajectory": index,
                    "step": step.step,
                    "block": step.block,
                    "block_size": step.block_size,
                    **step.columns,
                    "right": right,
                    "stable": stays[position],
                }
            )
        return rows[::-1]


def to_host(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
    """Copies on the host, and what to wait for before they are read: from a GPU they come into pinned memory while it
    goes on. On a CPU there is nothing to wait for."""
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor, non_blocking=True)
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return copies, None
    copied = torch.cuda.Event()
    copied.record()
    return copies, copied
