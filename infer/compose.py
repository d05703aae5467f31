"""Method configs by name, for scripts that run several."""

import re
from collections.abc import Iterable, Mapping
from itertools import product
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra import compose
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig

from infer.rules import Method
from routers.checkpoint import router_hash

PARTS = ("block", "commit", "filters")  # the config groups a method is made of


def expand(entries: Iterable[str]) -> list[str]:
    """Entries with every combination of the values that `|` separates: `threshold:commit.tau=0.7|0.9` is two.

    Raises ValueError where there is no entry, or one comes twice.
    """
    expanded = []
    for entry in entries:
        name, _, settings = str(entry).partition(":")
        choices = []
        for setting in _split(settings):
            key, _, values = setting.partition("=")
            choices.append([f"{key}={value}" for value in values.split("|")])
        expanded += [f"{name}:{','.join(c)}" if c else name for c in product(*choices)]
    if not expanded or len(set(expanded)) != len(expanded):
        raise ValueError(f"methods={list(entries)}: give a list with at least one name, each once: 'methods=[a,b]'")
    return expanded


def _split(settings: str) -> list[str]:
    """Settings at their commas, except those inside brackets."""
    return [s for s in re.split(r",(?![^\[]*\])", settings) if s]


def compose_method(config_name: str, entry: str, overrides: list[str]) -> DictConfig:
    """The whole config with `method` set to what `entry` names. `overrides` are the command line's.

    An entry is a name of conf/method/, or `name:block=lbs,commit.tau=0.8` with overrides relative to the method:
    `block`, `commit` and `filters` alone choose from conf/method/block/ and so on. Raises Hydra's own error for an
    unknown name, with the names there are. Call it inside a Hydra application.
    """
    name, _, settings = entry.partition(":")
    kept = [o for o in overrides if not o.startswith(("method=", "methods="))]
    own = [_own(s) for s in _split(settings)]
    return compose(config_name, overrides=[*kept, f"method={name}", *own])


def _own(setting: str) -> str:
    key = setting.partition("=")[0]
    return f"method{'/' if key in PARTS else '.'}{setting}"


def build_method(config_name: str, entry: str, overrides: list[str]) -> Method:
    return make_method(compose_method(config_name, entry, overrides).method)


def make_method(config: DictConfig) -> Method:
    """The method of a `method` config. ValueError names a setting that is not of its rule's type."""
    check_types("method", config)
    return instantiate(config)


def check_types(key: str, node: Any) -> None:
    """Each setting of a part, against the annotation of what the part is made with."""
    if not isinstance(node, Mapping):
        return
    hints = get_type_hints(get_class(node["_target_"]).__init__) if "_target_" in node else {}
    for name, value in node.items():
        hint = hints.get(name)
        if hint is not None and not _fits(value, kinds := _kinds(hint)):
            need = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ValueError(f"{key}.{name}={value!r}: need {need}")
        check_types(f"{key}.{name}", value)


def _kinds(hint: Any) -> tuple:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, kinds: tuple) -> bool:
    """Whether a setting is of one of these plain types; what is annotated otherwise is the rule's own to check."""
    if not set(kinds) <= {int, float, bool, str, NoneType}:
        return True
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def hash_routers(node: Any) -> Any:
    """A method config with each router folder replaced by the router's hash: what is decoded depends on that."""
    if isinstance(node, dict):
        return {k: router_hash(v) if k == "router" else hash_routers(v) for k, v in node.items()}
    return [hash_routers(v) for v in node] if isinstance(node, list) else node
