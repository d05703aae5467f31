"""Settings of the wrong type and prompts that are none: named before anything is loaded."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from infer.compose import check_types
from infer.prompting import read_prompts

ROOT = Path(__file__).parents[1]
PARTS = sorted(p for part in ("block", "commit", "filters") for p in (ROOT / "conf/method" / part).glob("*.yaml"))


@pytest.mark.parametrize("file", PARTS, ids=lambda p: p.stem)
def test_settings_of_another_type_are_named(file):
    """Every number, flag and name of every part, given as what it is not."""
    config = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if "_target_" not in config:
        ((_, config),) = config.items()  # a filter, under its own name
    for name, value in config.items():
        if name == "_target_" or (isinstance(value, str) and "router" in value):
            continue  # a router, or a setting of it, is its own to check
        wrong = 3 if isinstance(value, str) and not value.startswith("${") else "abc"
        with pytest.raises(ValueError, match=f"method.{file.parent.name}.{name}=.*need "):
            check_types(f"method.{file.parent.name}", {"_target_": config["_target_"], name: wrong})


class Listed:
    def __init__(self, names: list[str], limit: float | None = None):
        pass


def test_other_annotations_are_left_to_the_rule():
    check_types("method", {"_target_": f"{__name__}.Listed", "names": ["a", "b"], "limit": 3})
    with pytest.raises(ValueError, match="method.limit='b': need float or null"):
        check_types("method", {"_target_": f"{__name__}.Listed", "names": ["a"], "limit": "b"})


def test_what_types_fit():
    target = {"_target_": "infer.when.dilated.Dilated"}
    for good in ({"base": 3}, {"skip_below": None}, {"skip_below": 1}, {"skip_below": 0.5}):
        check_types("method.commit", target | good)
    for name, wrong in (("base", 2.5), ("base", True), ("base", None), ("skip_below", "high"), ("skip_below", False)):
        with pytest.raises(ValueError, match=f"commit.{name}={wrong!r}: need"):
            check_types("method", {"commit": target | {name: wrong}})


def test_prompts_from_a_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "One?"}\n\n{"prompt": "Two?"}\n')
    assert read_prompts(file) == [("a", "One?"), ("3", "Two?")]
    for wrong in ('{"prompt": ""}', '{"prompt": " "}', '{"prompt": 5}', '{"text": "One?"}', '"One?"', "One?"):
        file.write_text('{"prompt": "One?"}\n' + wrong)
        with pytest.raises(ValueError, match='p.jsonl, line 2: need {"prompt"'):
            read_prompts(file)
    file.write_text('{"id": 2, "prompt": "One?"}\n{"prompt": "Two?"}\n')
    with pytest.raises(ValueError, match="line 2: id '2' is that of line 1"):
        read_prompts(file)
