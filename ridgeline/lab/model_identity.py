"""ModelIdentity: which weights a result is about, so that a result of other weights is not taken for it.

`evaluate gate` records it, `plan` compares it. Files are compared by their content. A model of the hub whose
weights are not here is compared by repository, and by commit where both are known. Downloads nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ridgeline.models.errors import ModelNotFound
from ridgeline.models.files.content_id import content_id
from ridgeline.models.files.hub import cached_repo, hub_id, hub_parts
from ridgeline.models.files.registry import find_known, model_path

_COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHT_FILES = ("*.safetensors", "*.gguf")


class ModelIdentity(msgspec.Struct, frozen=True):
    """content: of its files; "" if the weights are not on this machine. repo, commit: on the hub."""

    name: str
    content: str = ""
    repo: str = ""
    commit: str = ""

    def same_as(self, other: ModelIdentity) -> str:
        """How both are known to be the same weights: by "content", "commit" or "repository"; "": not so."""
        if self.content and other.content:
            return "content" if self.content == other.content else ""
        if not self.repo or self.repo.lower() != other.repo.lower():
            return ""
        if self.commit and other.commit:
            return "commit" if self.commit == other.commit else ""
        return "repository"


def identify(model: str) -> ModelIdentity:
    """Of a MODEL argument, from what is on this machine."""
    known = find_known(model)
    if known is not None:
        return ModelIdentity(known.name, _content(model_path(known)))
    if hub_id(model) is not None:
        return _on_hub(model)
    path = Path(model).expanduser().resolve()
    path = path.parent if path.name == "config.json" else path
    return ModelIdentity(path.stem if path.suffix == ".gguf" else path.name, _content(path))


def _on_hub(model: str) -> ModelIdentity:
    try:
        repo, revision = hub_parts(model)
    except ModelNotFound:
        return ModelIdentity(model)
    if revision and _COMMIT.fullmatch(revision):
        commit = revision
    else:
        folder = cached_repo(repo)
        ref = None if folder is None else folder / "refs" / (revision or "main")
        commit = ref.read_text(encoding="utf-8").strip() if ref is not None and ref.is_file() else ""
    return ModelIdentity(repo, repo=repo, commit=commit)


def _content(path: Path) -> str:
    """Empty for a folder without weights: its other files do not say which model it is."""
    if path.is_file():
        return content_id(path) if path.suffix == ".gguf" else ""
    is_model = path.is_dir() and any(True for kind in WEIGHT_FILES for _ in path.glob(kind))
    return content_id(path) if is_model else ""
