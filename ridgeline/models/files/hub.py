"""Models on the Hugging Face hub: recognises their MODEL arguments, downloads them, removes them from the
cache.

Called by `registry`, the planner and `ridgeline models`. huggingface_hub is imported on first use.
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from ridgeline.models.errors import PICKLE_SUFFIXES, ModelNotFound

DESCRIPTIONS = ("*.json", "*.jinja")
HUB_FILES = (*DESCRIPTIONS, "*.safetensors")
# The same weights in other programs' formats.
HUB_DUPLICATES = ("consolidated*", "original/*", "onnx/*")
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILE_SUFFIXES = {".gguf", ".json", ".safetensors", ".toml", *PICKLE_SUFFIXES}


def hub_id(name: str) -> str | None:
    """org/name[@revision] of a MODEL on the hub: after hf:, or bare if there is no such path.

    None for everything else. The part after hf: is not checked here.
    """
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    is_path = name.startswith((".", "~")) or Path(name).suffix.lower() in _FILE_SUFFIXES
    if is_path or _HUB_ID.fullmatch(name) is None or Path(name).exists():
        return None
    return name


def fetch_config(name: str) -> Path:
    """Download only the config.json of org/name: for planning, without the weights."""
    return fetch_files(name, ["config.json", "hf_quant_config.json"])[1]


def fetch_files(name: str, patterns: list[str]) -> tuple[str, Path]:
    """(org/name, the directory that now contains the files of these patterns)."""
    repo, revision = hub_parts(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"{name}: huggingface_hub is not installed: pip install huggingface_hub"
        ) from error
    try:
        path = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=list(HUB_DUPLICATES),
        )
    except Exception as error:  # the hub's clients raise a dozen kinds, some not OSErrors
        raise ModelNotFound(f"{name}: {_reason(name, repo, error)}") from error
    return repo, Path(path)


def cached_repo(name: str) -> Path | None:
    """The directory of org/name in the hub's cache, with all of its revisions; None if it is missing."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repo, _ = hub_parts(name)
    folder = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    return folder if folder.is_dir() else None


def remove_repo(name: str) -> int | None:
    """Remove org/name from the hub's cache; returns the bytes freed, None if it is missing."""
    folder = cached_repo(name)
    if folder is None:
        return None
    freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    shutil.rmtree(folder)
    return freed


def hub_parts(name: str) -> tuple[str, str | None]:
    """The repository and the revision of hf:org/name[@revision]."""
    match = _HUB_ID.fullmatch(name.removeprefix("hf:"))
    if match is None:
        raise ModelNotFound(f"{name!r} must have the form hf:org/name or hf:org/name@revision")
    return match["repo"], match["revision"]


def _reason(name: str, repo: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    no_path = "" if name.startswith("hf:") else f"there is no directory {name} here, and "
    if isinstance(error, GatedRepoError):
        return f"it requires an agreement: accept it at https://huggingface.co/{repo}, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{no_path}the hub has no such model, or it is private. Check the name, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"the hub has {repo}, but not this revision"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return f"cannot be stored in the hub's cache ({said}); set HF_HOME to a writable directory"
    return (
        f"{no_path}it could not be downloaded from the Hugging Face hub ({type(error).__name__}: {said}). "
        "Check the name and the network (HF_ENDPOINT, HF_TOKEN, proxies), or put config.json, the "
        "tokenizer and the .safetensors files in a directory and give its path instead"
    )
