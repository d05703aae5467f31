"""A decoding loop written the way the published ones are: the baseline that `eval/speed.py` measures against.

One prompt at a time. Every step asks for logits at every position of the canvas, takes a softmax in float64 over the
whole vocabulary, and picks positions in Python loops. It commits what `sequential` and `threshold` commit, in as many
forwards, and is here for its speed alone: to decode, use `infer/`.
"""

import time
from collections.abc import Iterable, Iterator

import torch

from backbones.base import Backbone
from infer.canvas import STOPPED, Completion, Request
from infer.loop import Clock


class PlainLoop:
    """`tau` None commits the most confident position a step, else all of at least `tau`, in fixed blocks."""

    def __init__(self, backbone: Backbone, *, gen_length: int, block_length: int, stop: str, tau: float | None):
        self.backbone, self.gen_length, self.block_length = backbone, gen_length, block_length
        self.stop, self.tau = stop, tau
        self.clock = Clock(waits=True)

    def warm_up(self, requests: list[Request]) -> None:
        for _ in self.run(requests[:1]):
            pass
        self.clock = Clock(waits=True)

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for request in requests:
            yield self._complete(request)

    def _complete(self, request: Request) -> Completion:
        b, length, begin = self.backbone, self.gen_length, time.perf_counter()
        start = len(request.prompt)
        x = torch.full((1, start + length), b.mask_id)
        x[0, :start] = torch.tensor(request.prompt)
        pad, everything = torch.zeros(1, dtype=torch.long), torch.ones_like(x, dtype=torch.bool)
        committed_at = torch.full((length,), STOPPED)
        block = torch.full((length,), STOPPED)
        nfe = 0
        for number, first in enumerate(range(start, start + length, self.block_length)):
            last = min(first + self.block_length, start + length)
            while bool((x[0, first:last] == b.mask_id).any()):
                with self.clock.stage("backbone", b.device):
                    logits = b.logits(x, pad, everything).view(1, x.shape[1], -1)
                nfe += 1
                self.clock.forwards += 1
                with self.clock.stage("observe", b.device):
                    logits[..., b.forbidden_ids] = -torch.inf
                    p = torch.softmax(logits.to(torch.float64), dim=-1)
                    guess = logits.argmax(dim=-1)
                    confidence = p.gather(-1, guess[..., None])[..., 0]
                with self.clock.stage("when", b.device):
                    for row in range(x.shape[0]):
                        candidates = [j for j in range(first, last) if x[row, j] == b.mask_id]
                        best = max(candidates, key=lambda j: (float(confidence[row, j]), -j))
                        chosen = {best}
                        if self.tau is not None:
                            chosen |= {j for j in candidates if float(confidence[row, j]) >= self.tau}
                        for j in chosen:
                            x[row, j] = guess[row, j]
                            committed_at[j - start], block[j - start] = nfe - 1, number
                with self.clock.stage("bookkeeping", b.device):
                    ended = self.stop == "eos" and self._ended(x[0, start:])
                if ended:
                    x[0, start:][x[0, start:] == b.mask_id] = b.eos_id
        seconds = time.perf_counter() - begin
        return Completion(request.id, request.prompt, x[0, start:].clone(), committed_at, block, nfe, seconds)

    def _ended(self, output: torch.Tensor) -> bool:
        for token in output.tolist():
            if token == self.backbone.mask_id:
                return False
            if token == self.backbone.eos_id:
                return True
        return False
