"""Where a checkpoint lies: a local folder, or the Hugging Face hub's cache, downloaded once."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def find_checkpoint(path: str, revision: str | None = None, with_code: bool = False) -> Path:
    """The folder of `path`: as given, or relative to the repository, or else a hub id such as `GSAI-ML/LLaDA-8B-Base`.

    Nothing of it is executed here, and code in a checkpoint is not even downloaded, except `with_code`.
    """
    folder = Path(path).expanduser()
    for candidate in (folder, REPOSITORY / folder):
        if candidate.is_dir():
            return candidate
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(f"backbone.path={path}: no such folder; give one, or a hub id such as GSAI-ML/LLaDA-8B-Base")
    at = "" if revision is None else f" at backbone.revision={revision}"
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=NEEDED + ["*.py"] * with_code))
    except RepositoryNotFoundError as error:
        raise ValueError(f"backbone.path={path}: neither a folder here nor a repository on the hub") from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"backbone.revision={revision}: no commit of {path} on the hub; backbone.revision=null takes its newest"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"backbone.path={path}: no such folder, nothing cached under this hub id{at}, and the hub cannot be "
            f"reached ({type(error).__name__}); give the folder of a downloaded checkpoint: backbone.path=/path/to/it"
        ) from error
