"""Which files `ridgeline rag add` takes, and how each is cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.options import OptionError
from ridgeline.retrieval.parsing.parse import KINDS, kind_of

LONGEST_PATH = 512  # characters of an attribute
_KINDS = {"markdown": "markdown", "code": "code"}  # others are cut where sentences end


@dataclass(frozen=True, slots=True)
class LocalFile:
    """name: as it was given, with / between folders; it is the attribute `path` of the file."""

    path: Path
    name: str

    def content(self) -> bytes:
        return self.path.read_bytes()


def found_files(given: Sequence[Path]) -> list[LocalFile]:
    """The files given, and those of known kinds in the folders given; hidden ones are left out."""
    found: dict[str, LocalFile] = {}
    for path in given:
        if path.is_dir():
            for file in _within(path):
                _take(found, file)
        elif path.is_file():
            _take(found, path)
        else:
            raise OptionError(f"{path}: there is no such file or folder")
    if not found:
        known = " ".join(sorted(suffix for suffix in KINDS if suffix))
        raise OptionError(f"no file to add; of folders these kinds are taken: {known}")
    return list(found.values())


def _take(found: dict[str, LocalFile], path: Path) -> None:
    name = os.path.normpath(path).replace(os.sep, "/")
    if len(name) > LONGEST_PATH:
        raise OptionError(f"{name[:80]}…: a path may have at most {LONGEST_PATH} characters")
    found.setdefault(name, LocalFile(path, name))


def _within(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and kind_of(name) is not None and (Path(name).suffix or "."):
                yield Path(parent) / name


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def strategy_of(name: str, chunking: str, size: int, overlap: int) -> dict[str, Any]:
    """The chunking strategy of a file, as /v1/vector_stores takes it."""
    if chunking == "auto":
        return {"type": "auto"}
    kind = chunking if chunking != "kind" else _KINDS.get(str(kind_of(name)), "sentences")
    kind = "static" if kind == "tokens" else kind
    return {"type": kind, "static": {"max_chunk_size_tokens": size, "chunk_overlap_tokens": overlap}}
