"""Manifest: the files of one model that a peer or a store holds, each with its size and sha256.

A peer sends it at MANIFEST_PATH; in a store it is `manifest.json` beside the files. It comes from another
machine: `read_manifest` checks every name and number before anything is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

MANIFEST_PATH = "/replica/files"
MANIFEST_FILE = "manifest.json"
FETCH_HEADER = "x-ridgeline-fetch"  # random; one for each holder that a starting replica reads from
MANIFEST_BYTES = 4 << 20  # at most
FORMAT = 1
# Descriptions, tokenizers and weights. Pickles and programs are never copied.
SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf", ".model", ".txt")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BadManifest(Exception):
    """A manifest that cannot be used; the message says why."""


class HeldFile(msgspec.Struct, frozen=True):
    """name: relative to the model's folder. url: in a store, where it is not beside the manifest."""

    name: str
    bytes: int
    sha256: str
    url: str = ""


class HeldCache(msgspec.Struct, frozen=True):
    """An archive of packed weights or kernels, for machines with the same key."""

    kind: str
    key: dict[str, str]
    name: str
    bytes: int
    sha256: str
    url: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """entry: the file to load, where the model is one file; empty for a folder."""

    model: str  # MODEL of `ridgeline serve`
    files: tuple[HeldFile, ...]
    entry: str = ""
    caches: tuple[HeldCache, ...] = ()
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def file(self, sha256: str) -> HeldFile | None:
        return next((one for one in self.files if one.sha256 == sha256), None)


def read_manifest(data: bytes) -> Manifest:
    """A checked manifest. Raises BadManifest."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BadManifest(f"it is not a manifest: {error}") from None
    if manifest.format != FORMAT:
        raise BadManifest(f"it has format {manifest.format}; this version reads {FORMAT}")
    if not manifest.files:
        raise BadManifest("it lists no file")
    _check([*manifest.files, *manifest.caches])
    names = [file.name for file in manifest.files]
    for name in names:
        if not name.endswith(SUFFIXES):
            raise BadManifest(f"{name!r} is not a kind of file that models have")
    if len(set(names)) != len(names):
        raise BadManifest("it lists a file twice")
    if manifest.entry and manifest.entry not in names:
        raise BadManifest(f"its entry {manifest.entry!r} is not among its files")
    return manifest


def is_safe(name: str) -> bool:
    """Whether a relative name stays in its folder: no `..`, no absolute path, nothing hidden."""
    parts = name.split("/")
    return len(parts) <= 4 and PurePosixPath(name).as_posix() == name and all(map(_PART.fullmatch, parts))


def _check(items: Sequence[HeldFile | HeldCache]) -> None:
    for item in items:
        if not is_safe(item.name):
            raise BadManifest(f"the name {item.name!r} could leave the model's folder")
        if not _SHA256.fullmatch(item.sha256):
            raise BadManifest(f"{item.name}: {item.sha256[:80]!r} is not a sha256")
        if not 0 <= item.bytes < 1 << 50:
            raise BadManifest(f"{item.name}: it cannot have {item.bytes} bytes")
