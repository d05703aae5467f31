"""Export format of a router: a folder with `model.safetensors` and `config.json`."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import ClassVar, Protocol, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from routers.config import RouterConfig, from_dict, to_dict

REPOSITORY = Path(__file__).resolve().parents[1]


class RouterModule(nn.Module):
    """A router that saves and loads itself as transformers' models do."""

    config_class: ClassVar[type]
    config: RouterConfig

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes the router into `folder`, made if need be; each file is whole or absent, `config.json` comes last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            weights, config = Path(temporary) / "model.safetensors", Path(temporary) / "config.json"
            save_file(state, weights, metadata={"format": "pt"})
            config.write_text(json.dumps(to_dict(self.config), indent=2) + "\n")
            (folder / config.name).unlink(missing_ok=True)  # no old config beside new weights, wherever this is killed
            os.replace(weights, folder / weights.name)
            os.replace(config, folder / config.name)
        return folder

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """The router in `folder`, in evaluation mode.

        A relative folder that is not in the working directory is looked for in the repository, where the default
        routers are. ValueError: another kind, a damaged file, or weights that do not fit the config.
        """
        folder = find_folder(folder)
        try:
            config = from_dict(json.loads((folder / "config.json").read_text()), cls.config_class)
            router = cls(config)
            router.load_state_dict(load_file(folder / "model.safetensors"))
        except (SafetensorError, OSError, RuntimeError, TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"router folder {folder}: damaged or incomplete: {error}") from error
        except ValueError as error:
            raise ValueError(f"router folder {folder}: {error}") from error
        return router.eval()


def find_folder(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not folder.is_absolute() and not folder.exists() and (REPOSITORY / folder).exists():
        folder = REPOSITORY / folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"router folder {folder}: no config.json there; give a folder that train/ exported")
    return folder


def router_hash(folder: str | Path) -> str:
    """16 hex digits over all that decides what a router says: its weights and its config, reports left out."""
    folder = find_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in ("metrics", "training")}
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
    digest.update(json.dumps(kept, sort_keys=True).encode())
    return digest.hexdigest()[:16]


class Fits(Protocol):
    """What of a backbone a router's origin is compared with."""

    name: str
    fingerprint: str
    vocabulary: str
    vocab_size: int


def check_fits(config: RouterConfig, backbone: Fits, gen_length: int, allow_transfer: bool = False) -> None:
    """ValueError naming what differs where a router is put on another backbone or generation length.

    `allow_transfer` lets LPS go anywhere and LBS to other weights, but LBS only within one vocabulary and generation
    length: its embeddings are tied to both (§6.4).
    """
    origin = config.origin
    weights, tied = [], []
    if origin.fingerprint != backbone.fingerprint:
        weights.append(f"backbone {origin.backbone}/{origin.fingerprint}, not {backbone.name}/{backbone.fingerprint}")
    if origin.vocab_size != backbone.vocab_size:
        tied.append(f"vocabulary {origin.vocab_size}, not {backbone.vocab_size}")
    elif origin.vocabulary not in (None, backbone.vocabulary):
        tied.append(f"vocabulary {origin.vocabulary}, not {backbone.vocabulary}, which has other tokens")
    if origin.gen_length != gen_length:
        tied.append(f"gen_length {origin.gen_length}, not {gen_length}")
    stays = config.kind == "lbs" and tied
    if not (weights or tied) or (allow_transfer and not stays):
        return
    advice = (
        "LBS does not transfer to another vocabulary or length, train one there"
        if stays
        else "router.allow_transfer=true lets it go there"
    )
    raise ValueError(f"router.{config.kind} was trained for {'; '.join(weights + tied)}: {advice}")
