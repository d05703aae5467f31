"""The record every task hands out, and the interface of a task."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

SPLITS = ("train", "router", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One prompt with its reference.

    Attributes:
        id: unique within the task, names split and index, e.g. `test-00012`.
        prompt: what the user asks, without any chat markup.
        solution: a full worked reference completion, or "" where the task has none.
        answer: what the grader compares with.
        template: the family the problem was drawn from, "" where the task has none.
    """

    id: str
    prompt: str
    solution: str
    answer: str
    template: str = ""


class Task(Protocol):
    """Yields problems of a split and grades completions.

    `train` trains a backbone, `router` is for traces, `validation` chooses, `test` is only measured on. The
    splits share no prompt.
    """

    name: str

    def problems(self, split: str) -> Iterator[Problem]: ...

    def grade(self, problem: Problem, completion: str) -> bool: ...


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; allowed: {', '.join(SPLITS)}")
