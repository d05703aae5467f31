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
    pairs = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            pairs.append((str(values.get("id", number)), values["prompt"]))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f'prompts={file}, line {number}: need {{"prompt": "..."}}, got {line[:80]!r}') from error
    if not pairs:
        raise ValueError(f"prompts={file}: holds no prompt")
    return pairs
