"""Drills: made-up exercises in copying and arithmetic, mixed into a backbone's training.

A small model meets a handful of numbers in a word problem, and templates can be guessed from their text alone, so
attention that copies takes very long to form. A drill leaves nothing else to learn: the prompt lists labelled numbers
and expressions, the response goes through them in another order and works them out. Labels are drawn from the
vocabulary, so only looking up the prompt tells what follows one.

Sums are for arithmetic alone: a list of worked-out expressions in the forms of the word problems, of which only the
results are asked for, eight or so in the space in which a word problem has three.
"""

import re

import numpy as np
from transformers import PreTrainedTokenizerBase

LARGEST = 100
SUMS = 8  # equations in a list
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


def equation(words: list[str], rng: np.random.Generator) -> tuple[str, str]:
    """An expression up to its equals sign, and its value; integers of at most `LARGEST`."""
    money = ("", "", "", "$", "£")[rng.integers(5)]
    unit = f" {words[rng.integers(len(words))]}" if not money and rng.random() < 0.3 else ""
    space = " " if unit or rng.random() < 0.75 else ""
    equals = " = " if space or rng.random() < 0.7 else "="
    kind = rng.choice(6, p=(0.27, 0.27, 0.22, 0.1, 0.07, 0.07))
    x, y = (int(n) for n in _PRODUCTS[rng.integers(len(_PRODUCTS))])
    if kind == 0:
        a = int(rng.integers(1, LARGEST))
        b = int(rng.integers(1, LARGEST - a + 1))
        left, value = f"{money}{a}{unit}{space}+{space}{money}{b}{unit}", a + b
    elif kind == 1:
        a = int(rng.integers(1, LARGEST + 1))
        b = int(rng.integers(0, a + 1))
        left, value = f"{money}{a}{unit}{space}-{space}{money}{b}{unit}", a - b
    elif kind == 2:
        times = (f"{space}*{space}", " x ")[rng.integers(2)]
        left, value = f"{x}{times}{money}{y}{unit}", x * y
    elif kind == 3:
        left, value = f"{money}{x * y}{unit}{space}/{space}{y}", x
    elif kind == 4:
        below = int(rng.integers(2, 6))
        above, whole = int(rng.integers(1, below)), int(rng.integers(1, LARGEST // below + 1))
        share = f"{above}/{below}" if below in (3, 5) or rng.random() < 0.5 else str(above / below)
        left, value = f"{whole * below}{unit}{(f'{space}*{space}', ' x ')[rng.integers(2)]}{share}", above * whole
    else:
        parts = rng.integers(1, LARGEST // 3, size=3).tolist()
        left, value = f"{space}+{space}".join(f"{money}{n}{unit}" for n in parts), sum(parts)
    return f"{left}{equals}{money}", f"{value}"


class Drills:
    """Draws drills as token ids of prompt and solution."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.words = sorted({t.strip() for t in texts if WORD.fullmatch(t)})

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a drill's prompt and solution."""
        prompt, solution = drill(self.words, rng)
        solution_ids = self.tokenizer(solution, add_special_tokens=False).input_ids
        return self._prompt(prompt), np.array(solution_ids, dtype=np.int16)

    def draw_sums(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of a prompt, which says nothing, and of a list of equations; and which of the latter are results."""
        text, results = "", []
        for _ in range(SUMS):
            left, value = equation(self.words, rng)
            results.append((len(text) + len(left), len(text) + len(left) + len(value)))
            text += f"{left}{value}" + ("\n", ", ", ". ", " ")[rng.integers(4)]
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = np.array([end for _, end in found.offset_mapping])
        counted = np.zeros(len(ends), dtype=bool)
        for begin, end in results:
            counted |= (ends > begin) & (ends <= end)
        return self._prompt("sums"), np.array(found.input_ids, dtype=np.int16), counted

    def _prompt(self, text: str) -> np.ndarray:
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return np.array(ids, dtype=np.int16)
