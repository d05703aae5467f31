"""Drills: made-up exercises in copying and arithmetic, mixed into a backbone's training.

A small model meets a handful of numbers in a word problem, and templates can be guessed from their text alone, so
attention that copies takes very long to form. A drill leaves nothing else to learn: the prompt lists labelled numbers
and expressions, the response goes through them in another order and works them out. Labels are drawn from the
vocabulary, so only looking up the prompt tells what follows one.
"""

import re

import numpy as np
from transformers import PreTrainedTokenizerBase

LARGEST = 100
WORD = re.compile(r" [A-Za-z]{3,}")
TIMES = (" * ", "*", " x ")
_PRODUCTS = tuple((a, b) for a in range(2, LARGEST // 2 + 1) for b in range(2, LARGEST // a + 1))


def expression(rng: np.random.Generator) -> tuple[str, int | None]:
    """A number or an expression, and the value of the latter; all numbers are at most `LARGEST`."""
    kind = rng.choice(6, p=(0.25, 0.2, 0.2, 0.2, 0.1, 0.05))
    space = " " if rng.random() < 0.7 else ""
    a = int(rng.integers(1, LARGEST))
    if kind == 0:
        return str(a), None
    if kind == 1:
        b = int(rng.integers(1, LARGEST - a + 1))
        return f"{a}{space}+{space}{b}", a + b
    if kind == 2:
        b = int(rng.integers(1, a + 1))
        return f"{a}{space}-{space}{b}", a - b
    x, y = (int(n) for n in _PRODUCTS[rng.integers(len(_PRODUCTS))])
    if kind == 3:
        return f"{x}{TIMES[rng.integers(3)]}{y}", x * y
    if kind == 4:
        return f"{x * y}{space}/{space}{y}", x
    parts = rng.integers(1, LARGEST // 3, size=3).tolist()
    return f"{space}+{space}".join(map(str, parts)), sum(parts)


def drill(words: list[str], rng: np.random.Generator) -> tuple[str, str]:
    """Prompt and response of one drill."""
    count = int(rng.integers(3, 7))
    items = [(str(w), *expression(rng)) for w in rng.choice(words, size=count, replace=False)]
    separator = ("\n", ", ", ". ")[rng.integers(3)]
    prompt = separator.join(f"{word} {text}" for word, text, _ in items)
    lines, last = [], None
    for i in rng.permutation(count):
        word, text, value = items[i]
        lines.append(f"{word} {text}" + (f" = {value}" if value is not None else ""))
        last = text if value is None else value
    return prompt, separator.join(lines) + f"\n#### {last}"


class Drills:
    """Draws drills as token ids of prompt and solution."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.words = sorted({t.strip() for t in texts if WORD.fullmatch(t)})

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prompt, solution = drill(self.words, rng)
        messages = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        solution_ids = self.tokenizer(solution, add_special_tokens=False).input_ids
        return np.array(ids, dtype=np.int16), np.array(solution_ids, dtype=np.int16)
