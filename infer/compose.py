"""Method configs by name, for scripts that run several."""

from typing import Any

from hydra import compose
from hydra.utils import instantiate
from omegaconf import DictConfig

from infer.rules import Method
from routers.checkpoint import router_hash


def compose_method(config_name: str, entry: str, overrides: list[str]) -> DictConfig:
    """The whole config with `method` set to what `entry` names. `overrides` are the command line's.

    An entry is a name of conf/method/, or `name:commit.tau=0.8,block.block_length=16` with overrides relative to the
    method. Raises Hydra's own error for an unknown name, with the names there are. Call it inside a Hydra application.
    """
    name, _, settings = entry.partition(":")
    kept = [o for o in overrides if not o.startswith(("method=", "methods="))]
    own = [f"method.{s}" for s in settings.split(",") if s]
    return compose(config_name, overrides=[*kept, f"method={name}", *own])


def build_method(config_name: str, entry: str, overrides: list[str]) -> Method:
    return instantiate(compose_method(config_name, entry, overrides).method)


def hash_routers(node: Any) -> Any:
    """A method config with each router folder replaced by the router's hash: what is decoded depends on that."""
    if isinstance(node, dict):
        return {k: router_hash(v) if k == "router" else hash_routers(v) for k, v in node.items()}
    return [hash_routers(v) for v in node] if isinstance(node, list) else node
