"""Method configs by name, for scripts that run several."""

from hydra import compose
from hydra.utils import instantiate
from omegaconf import DictConfig

from infer.rules import Method


def split_label(entry: str) -> tuple[str, str, list[str]]:
    """(label, method, overrides) of an entry: `name`, or `name:commit.tau=0.8,block.block_length=16`.

    Overrides are relative to the method; the label of an entry is the entry itself.
    """
    name, _, settings = entry.partition(":")
    return entry, name, [f"method.{s}" for s in settings.split(",") if s]


def compose_method(config_name: str, entry: str, overrides: list[str]) -> DictConfig:
    """The whole config with `method` set to what `entry` names. `overrides` are the command line's.

    Raises Hydra's own error for an unknown method, with the names there are. Call it inside a Hydra application.
    """
    _, name, own = split_label(entry)
    kept = [o for o in overrides if not o.startswith(("method=", "methods="))]
    return compose(config_name, overrides=[*kept, f"method={name}", *own])


def build_method(config_name: str, entry: str, overrides: list[str]) -> Method:
    return instantiate(compose_method(config_name, entry, overrides).method)
