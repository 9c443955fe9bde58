"""Which caches a replica offers to peers, and which it fetches before its engine starts.

A cache is optional: whatever goes wrong here is logged in one line, and the engine packs or compiles itself.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.engine.caches import kernels, packed_weights
from ridgeline.engine.caches.keys import Key, kernels_key, packed_key
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.start.backend_choice import why_not_gpu
from ridgeline.engine.start.gpu_probe import find_gpu
from ridgeline.machine import cache_dir
from ridgeline.models.errors import ModelError
from ridgeline.models.files.pull import Report, locked
from ridgeline.models.sources.archive import Archive, BadArchive, differences, unpack
from ridgeline.models.sources.download import download, partial_bytes, partial_files
from ridgeline.models.sources.holders import Holder, HolderFailed
from ridgeline.models.sources.manifest import HeldCache
from ridgeline.models.weights.packed_cache import LEFT_FREE_BYTES
from ridgeline.ops.cpu.library import NativeError
from ridgeline.replica.messages import CacheFrom

log = logging.getLogger("ridgeline.server")

MANIFEST_S = 30.0  # for a holder's list of caches; packing or compiling here may take less than a long wait
PACKED, KERNELS = "packed weights", "kernels"
_LOCK, _UNPACKED = ".lock", ".unpacked-"


@dataclass(frozen=True, slots=True)
class MachineCache:
    """The kind of cache that this machine's backend uses, and its key."""

    kind: str
    key: Key


def cache_of(path: Path, config: EngineConfig) -> MachineCache | None:
    """None for a backend without one, or a model that the native library does not pack."""
    if config.backend == "torch":
        return None
    try:
        gpu = None if config.backend == "native" else find_gpu()
        if gpu is not None and why_not_gpu(config, lambda: gpu) is None:
            return MachineCache(KERNELS, kernels_key(gpu))
        if config.backend == "cuda":
            return None
        return MachineCache(PACKED, packed_key(path, config.weights))
    except (NativeError, ModelError, OSError):  # the engine says what is wrong
        return None


def is_present(wanted: MachineCache, path: Path, config: EngineConfig) -> bool:
    if wanted.kind == KERNELS:
        return kernels.holds(kernels.kernel_dir(), wanted.key)
    return packed_weights.entry_of(path, config.weights) is not None


def offered(path: Path, config: EngineConfig, last: Archive | None = None) -> Archive | None:
    """What this machine can give to another one with the same key. Hashes what it reads.

    last: the one that was offered before; the same object where nothing has changed.
    """
    own = cache_of(path, config)
    if own is None:
        return None
    if own.kind == KERNELS:
        folder = kernels.kernel_dir()
        files = kernels.compiled_files(folder)
        if files:
            kernels.mark(folder, own.key)
    else:
        entry = packed_weights.entry_of(path, config.weights)
        files = {} if entry is None else {packed_weights.MEMBER: entry}
    if not files:
        return None
    if last is not None and last.is_of(own.kind, own.key, files):
        return last
    return Archive(own.kind, own.key, files)


def held_cache(archive: Archive) -> HeldCache:
    kind, key = archive.manifest.kind, archive.manifest.key
    name = f"{kind.replace(' ', '-')}-{archive.sha256[:16]}.tar"
    return HeldCache(kind, key, name, archive.size, archive.sha256)


def fetch_cache(path: Path, config: EngineConfig, holders: Sequence[Holder]) -> CacheFrom | None:
    """Fetch and install this machine's cache from the first holder that has one with the same key."""
    wanted = cache_of(path, config)
    if wanted is None:
        return None
    if is_present(wanted, path, config):
        _remove_leftovers(wanted)
        return CacheFrom(wanted.kind, "local")
    refused = ""
    for holder in holders:
        try:
            given = [one for one in holder.manifest(MANIFEST_S).caches if one.kind == wanted.kind]
            if not given:
                continue
            match = next((one for one in given if one.key == wanted.key), None)
            if match is None:
                raise BadArchive("; ".join(differences(given[0].key, wanted.key)))
            return _fetch(holder, match, wanted, path, config)
        except (HolderFailed, BadArchive, OSError) as error:
            refused = f"{holder.label}: {error}"
            log.warning("%s of %s are not used: %s", wanted.kind, holder.label, error)
    return CacheFrom(wanted.kind, "", refused=refused) if refused else None


def _fetch(
    holder: Holder, held: HeldCache, wanted: MachineCache, path: Path, config: EngineConfig
) -> CacheFrom:
    began = time.monotonic()
    folder, place = _folders(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    with _locked(folder, place, lambda *_: None):
        if is_present(wanted, path, config):  # another replica of this machine has fetched it
            return CacheFrom(wanted.kind, "local")
        archive = folder / f"{held.sha256}.tar"
        _sweep(folder, place, partial_files(archive, held))
        _check_space(held, archive, place)
        fetched = _install(holder, held, wanted, archive, place, path, config)
    seconds = time.monotonic() - began
    log.info("%s: %.1f MB from %s in %.1f s", wanted.kind, fetched / 1e6, holder.label, seconds)
    return CacheFrom(wanted.kind, holder.label, fetched, seconds)


def _install(
    holder: Holder,
    held: HeldCache,
    wanted: MachineCache,
    archive: Path,
    place: Path,
    path: Path,
    config: EngineConfig,
) -> int:
    """Returns the bytes that were transferred."""
    unpacked = Path(tempfile.mkdtemp(prefix=_UNPACKED, dir=place))
    try:
        fetched = download(holder, held, archive)
        unpack(archive, wanted.kind, wanted.key, unpacked)
        archive.unlink()
        if wanted.kind == KERNELS:
            kernels.install(unpacked, kernels.kernel_dir(), wanted.key)
        else:
            packed_weights.install(unpacked, path, config.weights)
    finally:
        archive.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)
    return fetched


# ---- the folders of archives ----


def _folders(wanted: MachineCache) -> tuple[Path, Path]:
    """Of archives, and to unpack in: on the disk of the cache, where an install is a rename."""
    folder = cache_dir() / "archives"
    return folder, kernels.kernel_dir() if wanted.kind == KERNELS else folder


@contextlib.contextmanager
def _locked(folder: Path, place: Path, report: Report) -> Iterator[None]:
    with contextlib.ExitStack() as locks:
        for one in dict.fromkeys((folder, place)):
            locks.enter_context(locked(one / _LOCK, report))
        yield


def _sweep(folder: Path, place: Path, kept: Collection[Path]) -> None:
    """Remove what a killed process left. The caller holds the locks."""
    left = [path for path in folder.iterdir() if path.name != _LOCK and path not in kept]
    for path in (*left, *place.glob(f"{_UNPACKED}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_leftovers(wanted: MachineCache) -> None:
    """Where nothing is to be fetched. Skipped while another process fetches."""

    def taken(*_: object) -> None:
        raise BlockingIOError

    folder, place = _folders(wanted)
    with contextlib.suppress(OSError), _locked(folder, place, taken):
        _sweep(folder, place, ())


def _check_space(held: HeldCache, archive: Path, place: Path) -> None:
    """For the archive, and for its contents. Raises BadArchive."""
    folder = archive.parent
    needed = {folder: held.bytes - partial_bytes(archive, held)}
    if folder.stat().st_dev == place.stat().st_dev:
        needed[folder] += held.bytes
    else:
        needed[place] = held.bytes
    for where, size in needed.items():
        free = shutil.disk_usage(where).free
        if free < size + LEFT_FREE_BYTES:
            raise BadArchive(
                f"unpacking it needs {size:,} bytes and a reserve of 1 GiB, but {where} has {free:,} free"
            )
