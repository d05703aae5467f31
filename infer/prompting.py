"""From prompts as text to requests as token ids."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from backbones.base import Backbone
from infer.canvas import Request


def make_requests(backbone: Backbone, prompts: Iterable[tuple[str, str]], gen_length: int) -> Iterator[Request]:
    """Requests for (id, prompt) pairs; prompts that leave no room for `gen_length` positions are left out."""
    for name, prompt in prompts:
        ids = backbone.encode(prompt)
        if 1 <= len(ids) <= backbone.max_length - gen_length:
            yield Request(name, ids)


def read_prompts(file: Path) -> list[tuple[str, str]]:
    """(id, prompt) pairs of a JSON-lines file; a missing id is the line number. ValueError names the bad line."""
    if not file.is_file():
        raise ValueError(f"prompts={file}: no such file")
    pairs, lines = [], {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            name, prompt = str(values.get("id", number)), values["prompt"]
        except (json.JSONDecodeError, KeyError, AttributeError):
            name, prompt = "", None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'prompts={file}, line {number}: need {{"prompt": "..."}}, got {line[:80]!r}')
        if name in lines:
            raise ValueError(
                f"prompts={file}, line {number}: id {name!r} is that of line {lines[name]}; ids must be unique, and "
                "a line without one has its number"
            )
        lines[name] = number
        pairs.append((name, prompt))
    if not pairs:
        raise ValueError(f"prompts={file}: holds no prompt")
    return pairs
