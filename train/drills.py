"""Drills: made-up exercises in copying and arithmetic, mixed into a backbone's training.

A small model meets a handful of numbers in a word problem, and templates can be guessed from their text alone, so
attention that copies takes very long to form. A drill leaves nothing else to learn: the prompt lists labelled numbers
and expressions, the response goes through them in another order and works them out. Labels are drawn from the
vocabulary, so only looking up the prompt tells what follows one.

Sums are for arithmetic alone: a list of worked-out expressions, made up or lines of the word problems' solutions, of
which only the results are asked for, eight or so in the space in which a word problem has three.
"""

import re
from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

LARGEST = 100
SUMS = 8  # equations in a list
LIST_LENGTH = 120  # tokens; what a list has beyond them is cut off
RESULT = re.compile(r"= ?[$£€]?(\d+(?:\.\d+)?)")  # in a line of a solution
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
    kind = rng.choice(6, p=(0.25, 0.3, 0.12, 0.08, 0.07, 0.18))
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
        # Sorted points p0 <= p1 <= ... and the steps between them: p0 + steps = last, and last - steps = p0.
        count = int(rng.integers(2, 4))
        points = np.sort(rng.integers(0, LARGEST + 1, size=count + 1))
        parts, whole = np.diff(points).tolist(), int(points[-1])
        if rng.random() < 0.5:
            numbers, sign, value = [int(points[0]), *parts], "+", whole
        else:
            numbers, sign, value = [whole, *parts], "-", int(points[0])
        left = f"{space}{sign}{space}".join(f"{money}{n}{unit}" for n in numbers)
    return f"{left}{equals}{money}", f"{value}"


def solution_lines(solutions: Iterable[str]) -> list[tuple[str, tuple[int, int]]]:
    """The lines of `solutions` that work something out, and where in each its result stands (begin, end)."""
    found = []
    for solution in solutions:
        for line in solution.split("\n"):
            results = list(RESULT.finditer(line))
            if results:
                found.append((line, results[-1].span(1)))
    return found


class Drills:
    """Draws drills as token ids of prompt and solution.

    `solutions` are the word problems' own: half of the lists of sums are then lines of them, the rest is made up.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, solutions: Iterable[str] = ()):
        self.tokenizer = tokenizer
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.words = sorted({t.strip() for t in texts if WORD.fullmatch(t)})
        self.lines = solution_lines(solutions)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a drill's prompt and solution."""
        prompt, solution = drill(self.words, rng)
        solution_ids = self.tokenizer(solution, add_special_tokens=False).input_ids
        return self._prompt(prompt), np.array(solution_ids, dtype=np.int16)

    def draw_sums(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of a prompt, which says nothing, and of a list of equations; and which of the latter are results."""
        text, results = "", []
        from_problems = bool(self.lines) and rng.random() < 0.5
        for _ in range(SUMS):
            if from_problems:
                line, (begin, end) = self.lines[rng.integers(len(self.lines))]
                separator = "\n"
            else:
                left, value = equation(self.words, rng)
                line, begin, end = f"{left}{value}", len(left), len(left) + len(value)
                separator = ("\n", ", ", ". ", " ")[rng.integers(4)]
            results.append((len(text) + begin, len(text) + end))
            text += f"{line}{separator}"
        ids, counted = counted_tokens(self.tokenizer, text, results)
        return self._prompt("sums"), ids[:LIST_LENGTH], counted[:LIST_LENGTH]

    def _prompt(self, text: str) -> np.ndarray:
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return np.array(ids, dtype=np.int16)


def counted_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Iterable[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of `text`, and which of them end within one of `spans` of characters (begin, end)."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = np.array([end for _, end in found.offset_mapping])
    counted = np.zeros(len(ends), dtype=bool)
    for begin, end in spans:
        counted |= (ends > begin) & (ends <= end)
    return np.array(found.input_ids, dtype=np.int16), counted


def asked_for_results(tokenizer: PreTrainedTokenizerBase, solution: str) -> np.ndarray:
    """Which tokens of a word problem's solution are results of its equations, bool."""
    return counted_tokens(tokenizer, solution, (m.span(1) for m in RESULT.finditer(solution)))[1]
