"""Stop rules: when a row is finished."""

from collections.abc import Callable

from torch import Tensor

from infer.canvas import Canvas


def full_length(canvas: Canvas) -> Tensor:
    """Rows (B,) bool to end early: none; a row runs until no mask is left."""
    return canvas.masked_BL.new_zeros(canvas.masked_BL.shape[0])


def eos(canvas: Canvas) -> Tensor:
    """Rows (B,) bool with EOS committed and every position before it committed. Prompts are not looked at."""
    prefix_BL = canvas.masked_BL.cumsum(dim=1) == 0
    return (prefix_BL & (canvas.generation_BL == canvas.eos_id)).any(dim=1)


STOP_RULES: dict[str, Callable[[Canvas], Tensor]] = {"eos": eos, "full_length": full_length}
