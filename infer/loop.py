"""The one decoding loop. It knows no method, no task and no model by name.

Serves generation, traces, evaluation and routers alike. Rows of a batch are at different steps and blocks; a finished
row leaves and the next request takes its slot. A row's result does not depend on what shares its batch.

On a GPU the host queues work and waits only where it looks at a result, which it does once a step: which rows are
finished, and for those that are not how many positions the next forward is asked for and computes. One rule looks
oftener, `DilatedSpacing`, at the end of a step; `tests/test_waiting.py` counts. A clock that waits adds one a stage.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from backbones.base import Backbone
from backbones.host import may_hold
from infer.cache import StepCache
from infer.canvas import Canvas, Completion, Request, generator_of
from infer.drift import Drift
from infer.observation import Known, Observation, check_logits, observe
from infer.plan import Plan, look
from infer.rules import Method
from infer.stop import STOP_RULES

STAGES = ("backbone", "observe", "where", "when", "bookkeeping")


class Observer(Protocol):
    """Watches decoding; changes nothing."""

    def step(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> None:
        """After a decision, before it is written: `canvas` is what the denoiser saw, with the active blocks set."""

    def finished(self, completion: Completion) -> None: ...


@dataclass
class Clock:
    """Seconds spent per stage, and forwards of the whole batch.

    `waits`: on a GPU every stage is waited for, so that its time is its own, which costs the speed of queueing ahead.
    Without, a stage's seconds are those in which it was queued, and waits fall where a result is looked at.
    """

    waits: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    forwards: int = 0
    router_seconds: float = 0.0

    @contextmanager
    def stage(self, name: str, device: torch.device, router: bool = False):
        begin = time.perf_counter()
        yield
        if self.waits and device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = time.perf_counter() - begin
        self.seconds[name] += spent
        if router:
            self.router_seconds += spent


class Decoder:
    """Completes requests with one backbone and one method.

    `gen_length` L positions each; `batch_size` rows at once; `temperature` 0 is greedy. At a temperature each row
    draws from a generator of its own, seeded by `seed` and the request's id. `timed`: the clock waits for each stage.
    """

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        *,
        gen_length: int,
        batch_size: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        observers: Iterable[Observer] = (),
        extra_needs: frozenset[str] = frozenset(),
        timed: bool = False,
    ):
        if not 1 <= gen_length < backbone.max_length:
            raise ValueError(f"gen_length={gen_length}: need 1 to {backbone.max_length - 1} for {backbone.name}")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: need at least 1")
        if temperature < 0:
            raise ValueError(f"temperature={temperature}: need 0 (greedy) or more")
        if method.stop not in STOP_RULES:
            raise ValueError(f"stop={method.stop!r} is unknown; allowed: {', '.join(STOP_RULES)}")
        for rule in (method.block, method.commit, *method.filters):
            rule.bind(backbone, gen_length)
        self.backbone, self.method = backbone, method
        self.gen_length, self.batch_size = gen_length, batch_size
        self.temperature, self.seed = temperature, seed
        self.observers = tuple(observers)
        self.needs = method.needs | extra_needs
        self.stop = STOP_RULES[method.stop]
        self._forget()
        self.clock = Clock(waits=timed)

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yields a completion for every request, in the order in which they finish."""
        waiting = iter(requests)
        self._forget()
        canvas, entered, generators = None, {}, {}
        while True:
            with self._stage("bookkeeping"):
                canvas = self._refill(canvas, waiting, entered, generators)
            if canvas is None:
                return
            plan = self._plan(canvas)
            if any(plan.done):
                finished, canvas = self._collect(canvas, plan.done, entered, generators)
                yield from finished
            else:
                self._step(canvas, plan, generators)

    @torch.inference_mode()
    def warm_up(self, requests: list[Request], forwards: int = 4) -> None:
        """Takes up to `forwards` steps on one batch of `requests` and forgets them and their time."""
        b = self.backbone
        canvas = Canvas.of(requests[: self.batch_size], self.gen_length, b.mask_id, b.eos_id, b.device)
        generators = {name: torch.Generator().manual_seed(0) for name in canvas.ids}
        self._forget()
        for _ in range(forwards):
            plan = self._plan(canvas)
            if any(plan.done):
                break
            self._step(canvas, plan, generators)
        self.clock = Clock(waits=self.clock.waits)

    def _plan(self, canvas: Canvas) -> Plan:
        """What the next step computes and reads, and whether the last one left rows finished."""
        rule = self.method.block
        # 1. Rows whose block is full open the next one; a rule that reads statistics does so in the step.
        with self._stage("where", rule.has_router):
            full_B = ~canvas.candidates_BL.any(dim=1)
            if not rule.needs and may_hold(full_B.any()):
                canvas.open_blocks(full_B, rule.form(canvas, None, full_B) & canvas.masked_BL)
        # 2. The denoiser is asked for the block, or for every mask where the block is still to be chosen or all are
        #    followed.
        with self._stage("bookkeeping"):
            computing = self.step_cache.plan(canvas, full_B)
            refill_B, compute_BL, compute_BT = (*computing, None) if computing else (None, None, None)
            asked_BL = candidates_BL = canvas.candidates_BL
            if self.drift is not None:
                asked_BL = canvas.masked_BL if computing is None else canvas.masked_BL & compute_BL
            if rule.needs:
                asked_BL = torch.where(full_B[:, None], canvas.masked_BL, asked_BL)
            asked_BT = canvas.columns(asked_BL)
            if computing:
                compute_BT = self.step_cache.columns(canvas, refill_B, compute_BL, asked_BT)
            forming_B = full_B if rule.needs else None
            found = look(
                masked=canvas.masked_BL.any(dim=1),
                asked=asked_BL.sum(dim=1),
                candidates=None if asked_BL is candidates_BL else candidates_BL.sum(dim=1),
                forming=forming_B,
                refilling=refill_B,
                computed=None if compute_BT is None else compute_BT.sum(dim=1),
                broken=self._broken,
                committed=self._committed_B,
            )
        check_logits(any(found["broken"]))
        assert all(found["committed"]), "a row committed nothing"
        self._broken = self._committed_B = None
        candidates = None if any(found["forming"]) else found["candidates"] or found["asked"]
        return Plan(
            forming_B=forming_B,
            asked_BL=asked_BL,
            asked_BT=asked_BT,
            refill_B=refill_B,
            compute_BT=compute_BT,
            done=[not masked for masked in found["masked"]],
            refilling=found["refilling"],
            computed=found["computed"],
            known=Known(found["asked"], candidates, found["forming"]),
        )

    def _step(self, canvas: Canvas, plan: Plan, generators: dict[str, torch.Generator]) -> None:
        """One forward and one decision."""
        block_rule, commit_rule = self.method.block, self.method.commit
        forms = any(plan.known.forming)
        with self._stage("backbone"):
            logits_NV = self.step_cache.logits(canvas, plan)
        # 3. One pass over the logits gives all that anybody reads.
        with self._stage("observe"):
            seen = observe(
                logits_NV,
                plan.asked_BL,
                self.needs | block_rule.needs if forms else self.needs,
                self.backbone.forbidden_ids,
                self.temperature,
                self._uniform(canvas, generators),
                plan.known,
            )
            if self.drift is not None:
                seen = replace(seen, kl_BLH=self.drift.update(logits_NV, plan.asked_BL))
        if forms:
            with self._stage("where", block_rule.has_router):
                block_BL = block_rule.form(canvas, seen, plan.forming_B) & canvas.masked_BL
                canvas.open_blocks(plan.forming_B, block_BL)
        # 4. Filters narrow what the commit rule may choose, it decides, filters thin.
        with self._stage("when", commit_rule.has_router):
            chosen_BL = self.method.decide(canvas, seen)
        with self._stage("bookkeeping"):
            for observer in self.observers:
                observer.step(canvas, seen, chosen_BL)
            canvas.commit(chosen_BL, seen.top1_BL)
            canvas.fill_with_eos(self.stop(canvas))
            self._broken, self._committed_B = seen.broken, chosen_BL.any(dim=1)
        self.clock.forwards += 1

    def _refill(self, canvas, waiting, entered, generators) -> Canvas | None:
        free = self.batch_size - (len(canvas.ids) if canvas else 0)
        fresh = []
        while len(fresh) < free and (request := next(waiting, None)) is not None:
            self._check(request, entered)
            fresh.append(request)
            entered[request.id] = time.perf_counter()
            if self.temperature > 0:
                generators[request.id] = generator_of(f"{self.seed} {request.id}")
        if not fresh:
            return canvas
        b = self.backbone
        joined = Canvas.of(fresh, self.gen_length, b.mask_id, b.eos_id, b.device)
        return canvas.join(joined) if canvas else joined

    def _check(self, request: Request, entered: dict[str, float]) -> None:
        room = self.backbone.max_length - self.gen_length
        if not 1 <= len(request.prompt) <= room:
            raise ValueError(
                f"prompt {request.id!r} has {len(request.prompt)} tokens; gen_length={self.gen_length} leaves room "
                f"for 1 to {room} of {self.backbone.name}'s {self.backbone.max_length}"
            )
        if request.id in entered:
            raise ValueError(f"prompt id {request.id!r} is there twice; ids must be unique")
        if request.reference is not None and len(request.reference) != self.gen_length:
            raise ValueError(f"reference of {request.id!r} has {len(request.reference)} tokens, not {self.gen_length}")

    def _collect(self, canvas, done, entered, generators) -> tuple[list[Completion], Canvas | None]:
        """Takes the rows that are done out; the rest go on."""
        with self._stage("bookkeeping"):
            completions = []
            for row, ended in enumerate(done):
                if not ended:
                    continue
                generators.pop(canvas.ids[row], None)
                completions.append(
                    Completion(
                        id=canvas.ids[row],
                        prompt=canvas.prompts[row],
                        tokens=canvas.generation_BL[row].cpu().clone(),
                        committed_at=canvas.committed_at_BL[row].cpu().clone(),
                        block=canvas.committed_block_BL[row].cpu().clone(),
                        nfe=int(canvas.step_B[row]),
                        latency_s=time.perf_counter() - entered[canvas.ids[row]],
                    )
                )
            for completion in completions:
                for observer in self.observers:
                    observer.finished(completion)
            left = [row for row, ended in enumerate(done) if not ended]
            self.step_cache.keep(left)
            if self.drift is not None:
                self.drift.keep(left)
            return completions, canvas.keep(left) if left else None

    def _forget(self) -> None:
        """Nothing of an earlier forward is left."""
        self.step_cache = StepCache(self.backbone, self.method)
        steps = self.method.commit.kl_steps
        self.drift = Drift(steps, self.backbone.forbidden_ids) if steps else None
        # How the last step ended: whether a logit was NaN, and which rows committed something.
        self._broken: Tensor | None = None
        self._committed_B: Tensor | None = None

    def _uniform(self, canvas: Canvas, generators: dict[str, torch.Generator]) -> Tensor | None:
        if self.temperature == 0:
            return None
        draws_BL = torch.stack([torch.rand(self.gen_length, generator=generators[i]) for i in canvas.ids])
        device = canvas.tokens_BT.device
        if device.type == "cuda":
            draws_BL = draws_BL.pin_memory()  # else the copy waits
        return draws_BL.to(device, non_blocking=True)

    def _stage(self, name: str, router: bool = False):
        return self.clock.stage(name, self.backbone.device, router)
