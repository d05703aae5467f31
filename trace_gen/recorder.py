"""The observer that records a replay: what the denoiser predicted at every step, labelled once the row is finished."""

from dataclasses import dataclass

import numpy as np
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
    """Collects steps per request; `labelled` turns a finished one into rows of `schema.STEPS`."""

    needs = frozenset(STATISTICS)

    def __init__(self):
        self._steps: dict[str, list[Step]] = {}

    def step(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> None:
        candidates_BL = canvas.candidates_BL
        counts = candidates_BL.sum(dim=1).tolist()
        flat = {"position": candidates_BL.nonzero()[:, 1], "rank": (canvas.block_BL.cumsum(dim=1) - 1)[candidates_BL]}
        for name in ("top1", *STATISTICS):
            flat[name] = getattr(seen, f"{name}_BL")[candidates_BL]
        arrays = {name: tensor.cpu().numpy() for name, tensor in flat.items()}
        ends = np.cumsum(counts)
        sizes = canvas.block_BL.sum(dim=1).tolist()
        steps, blocks = canvas.step_B.tolist(), canvas.block_number_B.tolist()
        for row, request in enumerate(canvas.ids):
            part = slice(ends[row] - counts[row], ends[row])
            columns = {name: array[part] for name, array in arrays.items()}
            self._steps.setdefault(request, []).append(Step(steps[row], blocks[row], sizes[row], columns))

    def finished(self, completion: Completion) -> None:
        pass

    def labelled(self, index: int, completion: Completion) -> list[dict]:
        """Rows for trajectory `index`, in order of steps; forgets the trajectory."""
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
