"""How often another precision changes a decision: the same canvases seen in both, and whole decodes in each.

python eval/precision.py limit=64
python eval/precision.py other=float16 method=eb_decode backbone=llada_8b_instruct backbone.dtype=float32

Statistics are float32 whatever the model's precision, so what can change is what the model itself computes. Positions
and steps come from the decode in the first precision; the second looks at every canvas of it. Positions of one prompt
are not independent, so their intervals are too narrow; outputs are one a prompt.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from backbones.base import Backbone
from backbones.checkpoint import write_atomically
from eval.metrics import wilson
from eval.runner import choose_problems
from infer.canvas import Canvas, Completion, Request
from infer.compose import make_method
from infer.loop import Decoder
from infer.observation import Observation, observe
from infer.rules import Method
from infer.when.threshold import check_probability


@dataclass
class Share:
    """`changed` of `n`."""

    changed: int = 0
    n: int = 0

    def add(self, differs: Tensor) -> None:
        """Counts a bool tensor."""
        self.changed, self.n = self.changed + int(differs.sum()), self.n + differs.numel()

    def row(self, name: str) -> dict:
        low, high = wilson(self.changed, self.n)
        return {
            "what": name,
            "changed": self.changed,
            "n": self.n,
            "share": self.changed / self.n,
            "low": low,
            "high": high,
        }


class SecondLook:
    """An observer of a decode that asks `other` for the same positions of every canvas, and counts what differs.

    `top1`: the predicted token of an asked position; `member`: whether its confidence is at least `tau`; `step`: what
    `method` commits in a row of a step, positions and tokens.
    """

    needs = frozenset({"confidence"})

    def __init__(self, other: Backbone, method: Method, tau: float):
        if method.commit.kl_steps:
            raise ValueError(
                f"method={method.name}: its rule compares steps, and the second precision sees each alone; use another"
            )
        self.other, self.method, self.tau = other, method, tau
        self.top1, self.member, self.step_taken = Share(), Share(), Share()

    def step(self, canvas: Canvas, seen: Observation, chosen_BL: Tensor) -> None:
        asked_BL = seen.asked_BL
        logits_NV = self.other.logits(canvas.tokens_BT, canvas.pad_B, canvas.columns(asked_BL))
        again = observe(logits_NV, asked_BL, self.method.needs | self.needs, self.other.forbidden_ids).check()
        self.top1.add((again.top1_BL != seen.top1_BL)[asked_BL])
        sure = [o.confidence_BL >= self.tau for o in (seen, again)]
        self.member.add((sure[0] != sure[1])[asked_BL])
        chosen_again_BL = self.method.decide(canvas, again)
        differs_BL = (chosen_again_BL != chosen_BL) | (chosen_BL & (again.top1_BL != seen.top1_BL))
        self.step_taken.add(differs_BL.any(dim=1))

    def finished(self, completion: Completion) -> None:
        pass


def measure(
    backbone: Backbone,
    other: Backbone,
    make_method: Callable[[], Method],
    requests: list[Request],
    *,
    gen_length: int,
    batch_size: int,
    tau: float,
) -> tuple[dict[str, Share], dict[str, tuple[Completion, Completion]]]:
    """Shares by name, and the completions of each request in both precisions. `make_method` gives a new method each."""
    method, sizes = make_method(), {"gen_length": gen_length, "batch_size": batch_size}
    look = SecondLook(other, method, tau)
    first = Decoder(backbone, method, observers=[look], extra_needs=look.needs, **sizes)
    second = Decoder(other, make_method(), **sizes)
    pairs: dict[str, list[Completion]] = {request.id: [] for request in requests}
    with tqdm(total=2 * len(requests), desc="comparing", unit="completion", mininterval=1) as bar:
        for decoder in (first, second):
            for completion in decoder.run(requests):
                pairs[completion.id].append(completion)
                bar.update()
    outputs = Share()
    for one, two in pairs.values():
        outputs.add((one.tokens != two.tokens).any())
    shares = {
        "top-1 token of a position": look.top1,
        f"confidence >= {tau:g} of a position": look.member,
        "what a row commits in a step": look.step_taken,
        "a whole output": outputs,
    }
    return shares, {name: (one, two) for name, (one, two) in pairs.items()}


@hydra.main(config_path="../conf", config_name="precision", version_base="1.3")
def main(cfg: DictConfig) -> None:
    check_probability("tau", cfg.tau)
    if cfg.limit < 1:
        raise ValueError(f"limit={cfg.limit}: need at least 1 problem")
    if cfg.other == cfg.backbone.dtype:
        raise ValueError(f"other={cfg.other} is backbone.dtype as well: nothing to compare; give two precisions")
    if cfg.decode.temperature:
        raise ValueError(f"decode.temperature={cfg.decode.temperature}: sampling is compared at 0 alone")
    backbone, other = instantiate(cfg.backbone), instantiate(cfg.backbone, dtype=cfg.other)
    task, length = instantiate(cfg.task), cfg.decode.gen_length
    chosen = choose_problems(task, cfg.split, backbone, length, cfg.limit)
    shares, pairs = measure(
        backbone,
        other,
        lambda: make_method(cfg.method),
        [request for _, request in chosen.values()],
        gen_length=length,
        batch_size=cfg.decode.batch_size,
        tau=cfg.tau,
    )
    grades = {k: [task.grade(chosen[k][0], backbone.decode(c.tokens)) for c in pair] for k, pair in pairs.items()}
    shares["whether an answer is right"] = Share(sum(a != b for a, b in grades.values()), len(grades))
    rows = [share.row(name) for name, share in shares.items()]
    show(rows, f"{backbone.name}, {cfg.method.name}: {cfg.other} against {cfg.backbone.dtype}, {len(pairs)} prompts")
    right = [sum(column) for column in zip(*grades.values(), strict=True)]
    print(f"right answers: {right[0]} in {cfg.backbone.dtype}, {right[1]} in {cfg.other}")
    out = Path(cfg.out)
    write_atomically(out / "precision.json", lambda path: path.write_text(json.dumps(rows, indent=2) + "\n"))
    print(out / "precision.json")


def show(rows: list[dict], title: str) -> None:
    table = Table("changed", "share", "95% interval", "count", title=title)
    for r in rows:
        table.add_row(
            r["what"], f"{r['share']:.3%}", f"{r['low']:.3%} to {r['high']:.3%}", f"{r['changed']:,} of {r['n']:,}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
