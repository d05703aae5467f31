"""What a router checkpoint says about itself."""

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """The backbone and settings a router was trained for.

    Attributes:
        backbone: its name.
        fingerprint: hash of its weights.
        vocab_size: V of its logits.
        mask_id: its mask token.
        gen_length: L of the traces.
        block_length: block size of the traces; the fallback size where blocks are learned.
        vocabulary: hash of its tokens and their ids; None in exports made before it was kept.
    """

    backbone: str
    fingerprint: str
    vocab_size: int
    mask_id: int
    gen_length: int
    block_length: int
    vocabulary: str | None = None


def check_heads(config: "RouterConfig") -> None:
    if config.width < 1 or config.heads < 1 or config.width % config.heads or config.layers < 1:
        raise ValueError(
            f"model.width={config.width}, model.heads={config.heads}, model.layers={config.layers}: each at least 1, "
            "and the width a multiple of the heads"
        )


@dataclass(frozen=True)
class LBSConfig:
    """Sizes of an LBS router. `inputs`: "both" or the ablation "entropy"; `threshold`: of inclusion."""

    origin: Origin
    embedding_size: int
    inputs: str = "both"
    width: int = 96
    heads: int = 4
    mlp_width: int = 192
    layers: int = 2
    metrics: dict[str, float] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    threshold: float = 0.5
    kind: str = "lbs"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self):
        check_heads(self)
        if self.inputs not in ("both", "entropy"):
            raise ValueError(f"inputs={self.inputs!r} is unknown; allowed: both, entropy")


@dataclass(frozen=True)
class LPSConfig:
    """Sizes of an LPS router.

    `features`: names and order of the inputs; `encoder`: "transformer" or the ablation "mlp"; `position_embedding`:
    whether the rank in the block is embedded; `max_block`: number of embedded ranks, later ones share the last.
    `threshold`: tau_psi.
    """

    origin: Origin
    features: tuple[str, ...] = ("position", "confidence", "entropy", "gap", "mask_ratio")
    encoder: str = "transformer"
    position_embedding: bool = True
    max_block: int = 64
    width: int = 32
    heads: int = 4
    mlp_width: int = 128
    layers: int = 2
    threshold: float = 0.9
    metrics: dict[str, float] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    kind: str = "lps"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self):
        check_heads(self)
        known = ("position", "confidence", "entropy", "gap", "mask_ratio")
        unknown = [f for f in self.features if f not in known]
        if unknown or not self.features:
            raise ValueError(f"features={list(self.features)}: need at least one of {', '.join(known)}")
        if self.encoder not in ("transformer", "mlp"):
            raise ValueError(f"encoder={self.encoder!r} is unknown; allowed: transformer, mlp")


RouterConfig = LBSConfig | LPSConfig


def to_dict(config: RouterConfig) -> dict[str, Any]:
    return asdict(config)


def from_dict(values: dict[str, Any], cls: type) -> RouterConfig:
    """The inverse of `to_dict`; `ValueError` for another kind or schema version."""
    wanted = cls.__dataclass_fields__["kind"].default
    if values.get("kind") != wanted:
        raise ValueError(f"router kind {values.get('kind')!r} found where {wanted!r} is needed")
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"router schema_version {values.get('schema_version')!r}; this code reads {SCHEMA_VERSION}")
    values = {**values, "origin": Origin(**values["origin"])}
    if "features" in values:
        values["features"] = tuple(values["features"])
    return cls(**values)
