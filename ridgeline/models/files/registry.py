"""Resolves a MODEL argument to files: a short name, a directory, a .gguf file or a hub id.

`resolve` is called by the engine, the command line and the tests. It checks that the files exist and are
unaltered; it never downloads a short name (`pull` does) and never reads weights except to hash them.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ridgeline.machine import cache_dir
from ridgeline.models.errors import PICKLE_SUFFIXES, BrokenModel, ModelNotFound, UnsupportedModel
from ridgeline.models.files.conversion import adapter_refusal, is_adapter, pickle_refusal
from ridgeline.models.files.hub import DESCRIPTIONS, HUB_FILES, fetch_files, hub_id
from ridgeline.models.files.known_models import KNOWN_MODELS, KnownModel, SmallFile
from ridgeline.models.spec.published import nearest_published

Source = Literal["registry", "directory", "gguf", "hub"]

_FAMILIES = (
    "deepseek falcon gemma glm gpt-oss granite kimi llama llava minimax mistral mixtral olmo phi qwen smollm "
    "tinyllama vicuna yi"
)
FAMILY_WORDS = frozenset(_FAMILIES.split())
_HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str  # as shown to users: the short name, the directory's name, or org/name
    path: Path  # a .gguf file, or a directory in Hugging Face layout
    source: Source


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file's state when its hash was last checked. With the same size and mtime it is not hashed again."""

    sha256: str
    bytes: int
    mtime_ns: int


def names_model(word: str, *, is_alone: bool = False) -> bool:
    """Whether a word means a MODEL rather than a prompt: one that exists, or one spelled like a model's name.

    is_alone: no other word follows. Then the spelling of a family is needed: `sha256` is a prompt.
    """
    if not word or any(mark.isspace() for mark in word):
        return False
    lower = word.lower()
    is_path = word.startswith(("./", "../", "~/", "/")) or lower.endswith(".gguf")
    if find_known(word) is not None or is_path or (Path(word) / "config.json").is_file():
        return True
    parts = re.split(r"[^a-z]+", lower)
    has_family = any(part in FAMILY_WORDS for part in parts) or any(
        len(family) > 4 and family in lower for family in FAMILY_WORDS
    )
    if is_alone:
        return has_family and (lower in FAMILY_WORDS or re.search(r"\d", word) is not None)
    names = [alias for known in KNOWN_MODELS for alias in (known.name, *known.aliases)]
    if has_family or hub_id(word) is not None or difflib.get_close_matches(lower, names, n=1, cutoff=0.8):
        return True
    # gpt-oss:20b, phi:latest, mymodel-7b
    is_tagged = re.fullmatch(r"[A-Za-z][\w.-]*:[\w.-]+", word) is not None
    return is_tagged or re.fullmatch(r"[A-Za-z][A-Za-z_-]*\d[\w.:-]*", word) is not None


def resolve(name: str) -> ResolvedModel:
    """The checked files of a MODEL argument; if they are missing, the error says what to do."""
    known = find_known(name)
    if known is not None:
        return _resolve_known(known)
    if hub_id(name) is not None:
        return _resolve_hub(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(path.resolve().name, _checked_directory(path), "directory")
    if path.is_file():
        return ResolvedModel(path.stem, _checked_file(path), "gguf")
    raise not_found(name)


def resolve_description(name: str) -> Path:
    """Where a MODEL's config and tokenizer are. Weights of a model on the hub are not downloaded."""
    if find_known(name) is None and hub_id(name) is not None:
        return _checked_directory(fetch_files(name, list(DESCRIPTIONS))[1])
    return resolve(name).path


def find_known(name: str) -> KnownModel | None:
    """The table entry of a short name or alias, case-insensitive; None for anything else."""
    wanted = name.lower()
    for known in KNOWN_MODELS:
        if wanted == known.name or wanted in known.aliases:
            return known
    return None


def cached_file(known: KnownModel) -> Path:
    """The path of a known model's file after a pull."""
    return cache_dir() / "models" / known.name / known.file_name


def model_path(known: KnownModel) -> Path:
    """The path to load after a pull: the file, or the directory if there are several files."""
    return cached_file(known).parent if known.beside else cached_file(known)


def manifest_file(path: Path) -> Path:
    return path.with_name(path.name + ".manifest.json")


def write_manifest(path: Path, sha256: str) -> None:
    """Record that `path`, as it is now, has this hash."""
    stat = path.stat()
    manifest = Manifest(sha256=sha256, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)
    # Written to a temporary file and renamed: a reader sees the old manifest or the new one.
    temporary = manifest_file(path).with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(manifest)) + "\n", encoding="utf-8")
    temporary.replace(manifest_file(path))


def is_intact(known: KnownModel, path: Path) -> bool:
    """Whether the cached file is the known one. Fast if its manifest still matches, else by hash.

    Small files next to it are hashed every time.
    """
    if any(not _is_intact_beside(small, path.parent / small.name) for small in known.beside):
        return False
    stat = path.stat()
    if stat.st_size != known.bytes:
        return False
    if _read_manifest(path) == Manifest(known.sha256, stat.st_size, stat.st_mtime_ns):
        return True
    if _sha256(path) != known.sha256:
        return False
    with contextlib.suppress(OSError):  # a read-only cache is hashed at every start: slow but correct
        write_manifest(path, known.sha256)
    return True


def _is_intact_beside(small: SmallFile, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == small.bytes and _sha256(path) == small.sha256


def _resolve_known(known: KnownModel) -> ResolvedModel:
    path = cached_file(known)
    if not path.is_file():
        raise ModelNotFound(
            f"{known.name} is not downloaded yet: run `ridgeline models pull {known.name}` "
            f"(it will be stored as {path})"
        )
    if not is_intact(known, path):
        raise BrokenModel(
            f"{path}: altered or truncated ({path.stat().st_size:,} bytes, {known.bytes:,} expected, or its "
            f"sha256{' or a file next to it' * bool(known.beside)} differs); "
            f"run `ridgeline models pull --force {known.name}`"
        )
    return ResolvedModel(known.name, model_path(known), "registry")


def _resolve_hub(name: str) -> ResolvedModel:
    repo, path = fetch_files(name, list(HUB_FILES))
    return ResolvedModel(repo, _checked_directory(path), "hub")


def refuse_pickles_alone(directory: Path) -> None:
    """Reject a directory whose only weights are pickles; next to safetensors they are never opened."""
    pickles = sorted(file for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and not any(directory.glob("*.safetensors")) and not any(directory.glob("*.gguf")):
        raise pickle_refusal(pickles[0])


def _checked_directory(path: Path) -> Path:
    if is_adapter(path):
        raise adapter_refusal(path)
    refuse_pickles_alone(path)
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"; it contains {ggufs[0].name}: give that file's path" if ggufs else ""
    raise ModelNotFound(f"{path}: no config.json, so this is not a model directory{hint}")


def _checked_file(path: Path) -> Path:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return path
    if suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    if suffix == ".safetensors":
        if is_adapter(path.parent):
            raise adapter_refusal(path.parent)
        raise UnsupportedModel(f"{path}: contains only weights; give the directory with its config.json")
    raise UnsupportedModel(f"{path}: not a .gguf file and not a model directory")


def not_found(name: str) -> ModelNotFound:
    """For a MODEL that is neither known nor a path: what it may be instead."""
    if os.sep in name or name.startswith((".", "~")) or Path(name).suffix in {".gguf", *PICKLE_SUFFIXES}:
        return ModelNotFound(f"{name}: no such file or directory")
    names = [alias for known in KNOWN_MODELS for alias in (known.name, *known.aliases)]
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    nearest = f" Did you mean {' or '.join(close)}?" if close else ""
    short = ", ".join(known.name for known in KNOWN_MODELS)
    example = " or ".join(nearest_published(name)) or "Qwen/Qwen3-8B"
    return ModelNotFound(
        f"no model is called {name!r}.{nearest} Short names: {short} (`ridgeline models list`). "
        f"MODEL may also be a directory (./{name}), a file (./{name}.gguf) or an id on the Hugging Face hub "
        f"({example})"
    )


def _read_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest(**json.loads(manifest_file(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # absent or damaged: use the hash


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
