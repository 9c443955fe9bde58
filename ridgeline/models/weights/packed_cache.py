"""The cache of packed weights between starts: a file per model, weights setting and state of the source.

An entry is used only if its source files have the same size, time and ends as when it was packed. When an
entry is stored, outdated entries and those of deleted models are removed, then the least recently used ones
if the cache exceeds MAX_CACHE_BYTES. An error here only makes the next start slower.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ridgeline.machine import cache_dir
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.sources.file_hashes import touch
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.packed_file import DamagedFile, Header, PackedImage, read_header, read_image
from ridgeline.models.weights.packed_formats import SIX_BIT_ISAS
from ridgeline.ops.cpu.interface import ABI_VERSION
from ridgeline.ops.cpu.library import Format, choose_isa, pack_float

_Found = TypeVar("_Found")

PACKED_VERSION = 5  # raised with every change to the packing, so that older entries are packed again
MAX_CACHE_BYTES = 64 << 30
LEFT_FREE_BYTES = 1 << 30  # of the disk: the cache must not fill it
MIN_ENTRY_BYTES = 8 << 20  # smaller ones are packed quickly
SUFFIX = ".packed"
_SAMPLE_BYTES = 64 << 10
_ABANDONED_S = 3600.0  # a temporary file this old no longer has a writer

Key = dict[str, Any]


def packed_dir() -> Path:
    return cache_dir() / "packed"


def source_key(path: Path, spec: ModelSpec, weights: str) -> Key:
    """Everything that packed weights depend on. OSError if a source file cannot be read."""
    return {
        **machine_key(),
        "weights": weights,
        "family": spec.family,
        "norm_offset": spec.norm.offset,
        "files": [fingerprint(each) for each in source_files(path)],
    }


def machine_key() -> Key:
    """The part of a key that depends on the library and the instruction set."""
    return {
        "version": PACKED_VERSION,
        "abi": ABI_VERSION,
        "layout": _layout_fingerprint(),
        "six_bits": choose_isa() in SIX_BIT_ISAS,
    }


def source_files(path: Path) -> list[Path]:
    """The files that packed weights are made from."""
    file = weights_file(path)
    files = [file] if file.suffix != ".json" else [file, *shard_paths(file)]
    beside = (file.with_name(name) for name in ("config.json", "hf_quant_config.json"))
    return files + [each for each in beside if file.suffix != ".gguf" and each.is_file()]


def entry_path(key: Key) -> Path:
    """The file of this key. Its name starts with model, weights and path, to find older states."""
    first = Path(key["files"][0]["path"])
    model = re.sub(r"[^\w.-]", "_", first.stem if first.suffix == ".gguf" else first.parent.name)[:80]
    place = hashlib.sha256(str(first).encode()).hexdigest()[:8]
    return packed_dir() / f"{model}.{key['weights']}.{place}.{_hash(key)}{SUFFIX}"


def find_entry(key: Key) -> Header | None:
    """The header of the entry with this key; None if there is none. A damaged one is removed."""

    def read(path: Path) -> Header:
        header, _ = read_header(path)
        if header.key != key:
            raise DamagedFile("it was made from another source")
        return header

    return _read_or_remove(entry_path(key), read)


def load_entry(key: Key) -> PackedImage | None:
    """The whole entry, in memory; None as for `find_entry`. MemoryError if memory is insufficient."""
    path = entry_path(key)
    image = _read_or_remove(path, read_image) if find_entry(key) else None
    if image is not None:
        with contextlib.suppress(OSError):  # a read-only cache works too
            touch(path)
    return image


def _read_or_remove(path: Path, read: Callable[[Path], _Found]) -> _Found | None:
    try:
        return read(path)
    except DamagedFile:
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        pass  # missing, or not readable
    return None


def temporary_path(key: Key, size: int) -> Path:
    """The temporary path of an entry of this size. Creates its directory; OSError if that fails, or if the
    disk has too little space."""
    path = entry_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < size + LEFT_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def keep_entry(key: Key, temporary: Path) -> None:
    """Rename a complete, synced file to its final name, and make room."""
    path = entry_path(key)
    temporary.replace(path)
    _sync_directory(path.parent)
    with contextlib.suppress(OSError):
        _remove_outdated(path)
        _remove_abandoned(path.parent)
        _remove_least_used(path)


def fingerprint(file: Path) -> Key:
    """A file's path, size, time and ends: enough to notice a change without reading all of it."""
    file = file.resolve()
    with file.open("rb") as content:
        stat = os.fstat(content.fileno())
        ends = hashlib.sha256(content.read(_SAMPLE_BYTES))
        content.seek(max(stat.st_size - _SAMPLE_BYTES, 0))
        ends.update(content.read(_SAMPLE_BYTES))
    return {
        "path": str(file),
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ends": ends.hexdigest()[:32],
    }


@cache
def _layout_fingerprint() -> str:
    """The packed bytes of a small matrix in every format: a library that packs differently uses no old entry,
    even if its version was not raised."""
    sample = np.sin(np.arange(20 * 80, dtype=np.float32)).reshape(20, 80)
    digest = hashlib.sha256()
    for format in Format:
        digest.update(pack_float(format, sample).data.data)
    return digest.hexdigest()[:32]


def _hash(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _remove_outdated(kept: Path) -> None:
    """Remove outdated entries of the same model, entries of deleted models, and other files."""
    model_and_place = kept.name.removesuffix(SUFFIX).rpartition(".")[0]
    for path in kept.parent.glob("*" + SUFFIX):
        if path != kept and (path.name.startswith(model_and_place + ".") or not _has_source(path)):
            path.unlink(missing_ok=True)


def _has_source(entry: Path) -> bool:
    try:
        header, _ = read_header(entry)
        return Path(header.key["files"][0]["path"]).exists()
    except (DamagedFile, OSError, LookupError, TypeError):
        return False


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob("*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            path.unlink(missing_ok=True)


def _remove_least_used(kept: Path) -> None:
    entries = [(path.stat(), path) for path in kept.parent.glob("*" + SUFFIX)]
    entries.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
    total = 0
    for stat, path in entries:
        total += stat.st_size
        if total > MAX_CACHE_BYTES and path != kept:
            path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
