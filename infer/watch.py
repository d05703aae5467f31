"""An observer that shows one canvas filling in the terminal."""

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infer.canvas import Canvas, Completion
from infer.observation import Observation


class Watch:
    """Draws the first row after each step: new tokens bold, masks as dots, the active block's masks in colour.

    `delay` seconds are waited after each frame. Without a terminal only the last frame is printed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, delay: float = 0.05):
        self.tokenizer, self.delay = tokenizer, delay
        self.live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "Watch":
        self.live.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.live.__exit__(*error)

    def step(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> None:
        chosen, masked, block = chosen_BL[0].tolist(), canvas.masked_BL[0].tolist(), canvas.block_BL[0].tolist()
        ids, predicted = canvas.generation_BL[0].tolist(), seen.top1_BL[0].tolist()
        frame = Text(f"step {int(canvas.step_B[0]) + 1}, {sum(chosen)} committed\n", style="dim")
        for i in range(len(ids)):
            if chosen[i]:
                frame.append(self._piece(predicted[i]), style="bold green")
            elif masked[i]:
                frame.append("·", style="bold yellow" if block[i] else "dim")
            else:
                frame.append(self._piece(ids[i]), style="default")
        self.live.update(frame, refresh=True)
        time.sleep(self.delay)

    def finished(self, completion: Completion) -> None:
        pass

    def _piece(self, token: int) -> str:
        return self.tokenizer.decode([token])
