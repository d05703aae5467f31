"""Runs methods over the same prompts, interleaved, so that a slow minute hits all of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from backbones.base import Backbone
from eval.metrics import Sample, Timing, result_row
from infer.canvas import Request, text_length
from infer.loop import Clock, Decoder
from infer.prompting import make_requests
from infer.rules import Method
from infer.when.oracle import Oracle
from tasks.problem import Problem, Task

ROUND_BATCHES = 4  # batches of prompts that a method decodes before the next one has its turn


@dataclass(frozen=True)
class Setting:
    """What all methods of a comparison share."""

    gen_length: int
    batch_size: int
    temperature: float = 0.0
    seed: int = 0


def choose_problems(
    task: Task, split: str, backbone: Backbone, gen_length: int, limit: int
) -> dict[str, tuple[Problem, Request]]:
    """The first `limit` problems of a split that fit, by id."""
    chosen = {}
    for problem in task.problems(split):
        for request in make_requests(backbone, [(problem.id, problem.prompt)], gen_length):
            chosen[problem.id] = (problem, request)
        if len(chosen) >= limit:
            break
    if not chosen:
        raise ValueError(f"task={task.name}: no problem left in split {split!r} that fits gen_length={gen_length}")
    return chosen


class Comparison:
    """Accumulates samples and times of several methods.

    `reference` makes the outputs that agreement is measured against and that the oracle reads: the label of one of
    `methods`, or a method of its own, which is run untimed.
    """

    def __init__(
        self, backbone: Backbone, task: Task, methods: dict[str, Method], reference: str | Method, setting: Setting
    ):
        self.backbone, self.task, self.setting = backbone, task, setting
        self.methods = methods
        self.referee = reference
        self.samples: dict[str, list[Sample]] = {label: [] for label in methods}
        self.clocks = {label: Clock(waits=True) for label in methods}
        self.wall = dict.fromkeys(methods, 0.0)
        self.reference: dict[str, list[int]] = {}

    def run(self, chosen: dict[str, tuple[Problem, Request]]) -> None:
        """All methods over all problems, after a few steps of warm-up each, in rounds of `ROUND_BATCHES` batches.

        Who begins a round changes from round to round; an oracle waits for its references.
        """
        decoders = {label: self._decoder(method) for label, method in self.methods.items()}
        referee = None if isinstance(self.referee, str) else self._decoder(self.referee)
        requests = [request for _, request in chosen.values()]
        anything = (self.backbone.eos_id,) * self.setting.gen_length
        for label, decoder in decoders.items():
            decoder.warm_up([replace(r, reference=anything) for r in requests[: self.setting.batch_size]])
            decoder.clock = self.clocks[label]
        size = ROUND_BATCHES * self.setting.batch_size
        progress = tqdm(total=len(requests) * len(decoders), desc="comparing", unit="completion", mininterval=1)
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            if referee:
                self.reference |= {c.id: c.tokens.tolist() for c in referee.run(part)}
            for label in self._order(start // size):
                decoder = decoders[label]
                begin = time.perf_counter()
                completions = list(decoder.run(self._with_reference(label, part)))
                self.wall[label] += time.perf_counter() - begin
                if label == self.referee:
                    self.reference |= {c.id: c.tokens.tolist() for c in completions}
                for completion in completions:
                    self._add(label, chosen[completion.id][0], completion)
                progress.update(len(part))
        progress.close()

    def _order(self, turn: int) -> list[str]:
        labels = list(self.methods)
        labels = labels[turn % len(labels) :] + labels[: turn % len(labels)]
        if isinstance(self.referee, str):
            waiting = [x for x in labels[: labels.index(self.referee)] if isinstance(self.methods[x].commit, Oracle)]
            labels = [x for x in labels if x not in waiting]
            after = labels.index(self.referee) + 1
            labels[after:after] = waiting
        return labels

    def rows(self) -> list[dict]:
        """One result a method, in their order; speed-ups against the first."""
        oracle = [label for label, method in self.methods.items() if isinstance(method.commit, Oracle)]
        ceiling = None
        if oracle:
            samples = self.samples[oracle[0]]
            ceiling = sum(s.tokens for s in samples) / sum(s.nfe for s in samples)
        rows: list[dict] = []
        for label in self.methods:
            clock = self.clocks[label]
            spent = clock.seconds
            timing = Timing(self.wall[label], spent["backbone"], spent["observe"], clock.router_seconds)
            first = rows[0] if rows else None
            batch = self.setting.batch_size
            eos = self.backbone.eos_id
            rows.append(result_row(label, self.samples[label], timing, batch, first, self.reference, ceiling, eos))
        return rows

    def _decoder(self, method: Method) -> Decoder:
        s = self.setting
        return Decoder(
            self.backbone,
            method,
            gen_length=s.gen_length,
            batch_size=s.batch_size,
            temperature=s.temperature,
            seed=s.seed,
        )

    def _with_reference(self, label: str, requests: Sequence[Request]) -> list[Request]:
        if not isinstance(self.methods[label].commit, Oracle):
            return list(requests)
        return [replace(r, reference=tuple(self.reference[r.id])) for r in requests]

    def _add(self, label: str, problem: Problem, completion) -> None:
        output = completion.tokens.tolist()
        text = self.backbone.decode(completion.tokens)
        self.samples[label].append(
            Sample(
                method=label,
                id=problem.id,
                prompt=problem.prompt,
                completion=text,
                correct=self.task.grade(problem, text),
                nfe=completion.nfe,
                tokens=text_length(output, self.backbone.eos_id),
                latency_ms=1000 * completion.latency_s,
                committed_at=completion.committed_at.tolist(),
                template=problem.template,
                output=output,
            )
        )
