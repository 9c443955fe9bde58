"""obtain(): the files of a model from the nearest source: this machine, a peer, a store, the hub.

Sources are tried in the order of the settings. A source that fails is logged in one line, and the next one
is tried; complete pieces of a file stay for it. Called by `ridgeline serve` before the engine starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.machine import cache_dir
from ridgeline.models.errors import ModelNotFound
from ridgeline.models.files.hub import hub_id
from ridgeline.models.files.known_models import KnownModel
from ridgeline.models.files.pull import PullFailed, ensure, locked, pull
from ridgeline.models.files.registry import (
    cached_file,
    find_known,
    is_intact,
    manifest_file,
    model_path,
    resolve,
    write_manifest,
)
from ridgeline.models.sources.download import download, partial_bytes, remove_partials
from ridgeline.models.sources.file_hashes import file_sha256, record_sha256
from ridgeline.models.sources.holders import Holder, HolderFailed, Peer, store_of
from ridgeline.models.sources.hub_cache import complete_snapshot
from ridgeline.models.sources.manifest import HeldFile, Manifest
from ridgeline.models.sources.model_files import model_files, plain_name
from ridgeline.replica.weight_sources import HUB, LOCAL, PEERS

log = logging.getLogger("ridgeline.server")

COMPLETE = ".complete.json"  # in a fetched folder: the manifest it was made from
NAME = ".name"  # in a fetched folder, also while it is incomplete: the model, as `plain_name` writes it
LEFT_FREE_BYTES = 1 << 30  # of the disk
PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True)
class Obtained:
    """source: local, `peer NAME`, `store URL` or hub. bytes, seconds: of the transfer; 0 where local."""

    path: Path
    source: str
    bytes: int = 0
    seconds: float = 0.0
    holder: Holder | None = None  # that gave them


def holders_of(sources: Sequence[str], peers: Sequence[str], key: str, model: str = "") -> list[Holder]:
    """Peers and stores, in the order of `sources`. peers: as NAME=URL, the nearest first.

    model: MODEL that peers are asked for; without it, each gives its first.
    """
    found: list[Holder] = []
    for source in sources:
        if source == PEERS:
            for peer in peers:
                name, _, url = peer.partition("=")
                found.append(Peer(name, url, key, model))
        elif source not in (LOCAL, HUB):
            found.append(store_of(source))
    return found


def obtain(model: str, sources: Sequence[str], holders: Sequence[Holder]) -> Obtained:
    """The checked files of a MODEL argument. ModelError where no source has them."""
    if (path := find_local(model)) is not None:
        return Obtained(path, LOCAL)
    folder = target_folder(model)
    failures: list[str] = []
    if not holders and HUB in sources:
        return _from_hub(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", lambda *_: None):
            if (path := find_local(model)) is not None:  # another replica of this machine has fetched it
                return Obtained(path, LOCAL)
            for place, holder in enumerate(holders):
                try:
                    return _from_holder(model, holder, folder)
                except HolderFailed as error:
                    later = [one.label for one in holders[place + 1 :]] + [HUB] * (HUB in sources)
                    then = f"the next source is {later[0]}" if later else "there is no other source"
                    log.warning("%s: no weights from %s: %s; %s", model, holder.label, error, then)
                    failures.append(f"{holder.label}: {error}")
    except OSError as error:
        raise PullFailed(f"{model}: cannot be stored in {folder}: {error}") from error
    if HUB not in sources:
        tried = "; ".join(failures) or "neither a peer nor a store is known"
        raise ModelNotFound(f"{model}: no source has its files ({tried}), and hub is not among the sources")
    return _from_hub(model)


def find_local(model: str) -> Path | None:
    """Complete and unaltered files on this machine, without any network access."""
    known = find_known(model)
    if known is not None:
        file = cached_file(known)
        if not file.is_file():
            return None
        if is_intact(known, file):
            return model_path(known)
        log.warning("%s: altered or truncated; it is fetched again", file)
        return None
    on_hub = hub_id(model) is not None
    if not on_hub and Path(model).expanduser().exists():
        return resolve(model).path
    if (fetched := _fetched(model)) is not None:
        return fetched
    return complete_snapshot(model) if on_hub else None


def target_folder(model: str) -> Path:
    """The folder that a fetched model is kept in."""
    known = find_known(model)
    if known is not None:
        return cached_file(known).parent
    name = re.sub(r"[^\w.-]+", "--", model).strip("-.")[-80:]
    return cache_dir() / "fetched" / f"{name}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def fetched_folders(model: str) -> list[Path]:
    """Folders that hold something of a model that peers or stores gave, with all revisions of org/name."""
    if find_known(model) is not None:
        return []
    names, on_hub = {model}, hub_id(model)
    if on_hub is not None:
        repo = on_hub.partition("@")[0]
        names |= {on_hub, repo, f"hf:{on_hub}", f"hf:{repo}"}
    found = {target_folder(name) for name in names}
    if on_hub is not None:
        all_fetched = (cache_dir() / "fetched").glob("*/")
        found |= {folder for folder in all_fetched if _name_of(folder).partition("@")[0] == repo}
    return sorted(folder for folder in found if folder.is_dir())


def _name_of(folder: Path) -> str:
    """The model that a fetched folder holds, or some files of it; empty: not known."""
    with contextlib.suppress(OSError, ValueError):
        return (folder / NAME).read_text(encoding="utf-8")
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        done = msgspec.json.decode((folder / COMPLETE).read_bytes(), type=_Completion)
        return plain_name(done.manifest.model)
    return ""


# ---- from a holder ----


def _from_holder(model: str, holder: Holder, folder: Path) -> Obtained:
    began = time.monotonic()
    manifest = holder.manifest()
    known = find_known(model)
    if known is None and plain_name(manifest.model) != plain_name(model):
        raise HolderFailed(f"it holds {manifest.model}")
    wanted = _known_files(known, manifest) if known is not None else list(manifest.files)
    remove_partials(folder, {folder / held.name: held for held in wanted})
    missing = [held for held in wanted if not _is_there(folder / held.name, held)]
    _check_space(model, missing, folder)
    if known is None:
        (folder / NAME).write_text(plain_name(model), encoding="utf-8")
    fetched = 0
    progress = _Progress(model, holder.label, sum(held.bytes for held in missing))
    # The largest last: a folder with the weights has everything else.
    for held in sorted(missing, key=lambda one: (one.bytes, one.name)):
        target = folder / held.name
        if known is not None:
            manifest_file(target).unlink(missing_ok=True)  # never next to a file it does not describe
        fetched += download(holder, held, target, progress.add)
        record_sha256(target, held.sha256)
    if known is not None:
        write_manifest(cached_file(known), known.sha256)
        path = model_path(known)
    else:
        path = _complete(folder, manifest)
    seconds = time.monotonic() - began
    log.info(
        "%s: %s bytes from %s in %.1f s, %.0f MB/s",
        *(model, f"{fetched:,}", holder.label, seconds, fetched / max(seconds, 1e-6) / 1e6),
    )
    return Obtained(path, holder.label, fetched, seconds, holder)


def _is_there(target: Path, held: HeldFile) -> bool:
    """Whether an earlier start, or another source, has brought this file already."""
    try:
        return target.stat().st_size == held.bytes and file_sha256(target) == held.sha256
    except OSError:
        return False


def _known_files(known: KnownModel, manifest: Manifest) -> list[HeldFile]:
    """The files of a short name under our names. Our table decides what they are, not the holder."""
    wanted = [(known.file_name, known.bytes, known.sha256)]
    wanted += [(small.name, small.bytes, small.sha256) for small in known.beside]
    found = []
    for name, size, sha256 in wanted:
        held = manifest.file(sha256)
        if held is None or held.bytes != size:
            raise HolderFailed(f"it does not hold {name} of {known.name} (sha256 {sha256[:12]}…)")
        found.append(HeldFile(name, size, sha256, held.url))
    return found


def _complete(folder: Path, manifest: Manifest) -> Path:
    """Say that the folder has all files of this manifest, as they are now."""
    states = {file.name: (folder / file.name).stat().st_mtime_ns for file in manifest.files}
    temporary = folder / f"{COMPLETE}.tmp"
    temporary.write_bytes(msgspec.json.encode({"manifest": manifest, "mtime_ns": states}))
    temporary.replace(folder / COMPLETE)
    return folder / manifest.entry if manifest.entry else folder


class _Completion(msgspec.Struct, frozen=True):
    manifest: Manifest
    mtime_ns: dict[str, int]


def _fetched(model: str) -> Path | None:
    """A fetched folder whose files are as they were when their hashes were checked."""
    folder = target_folder(model)
    try:
        done = msgspec.json.decode((folder / COMPLETE).read_bytes(), type=_Completion)
        for file in done.manifest.files:
            stat = (folder / file.name).stat()
            if (stat.st_size, stat.st_mtime_ns) != (file.bytes, done.mtime_ns.get(file.name)):
                log.warning("%s: altered or truncated; the model is fetched again", folder / file.name)
                return None
    except (OSError, msgspec.MsgspecError):
        return None
    return folder / done.manifest.entry if done.manifest.entry else folder


def _check_space(model: str, missing: Sequence[HeldFile], folder: Path) -> None:
    """What is complete, or in a partial file, needs no further space."""
    if not missing:
        return
    needed = sum(held.bytes - partial_bytes(folder / held.name, held) for held in missing) + LEFT_FREE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullFailed(
            f"{model}: fetching it needs {needed:,} bytes with a reserve of 1 GiB, but {folder} has {free:,} "
            "free; free some space or set RIDGELINE_CACHE to a directory on another disk"
        )


class _Progress:
    """A log line every few seconds."""

    def __init__(self, model: str, label: str, total: int) -> None:
        self._model, self._label, self._total = model, label, total
        self._done, self._next = 0, time.monotonic() + PROGRESS_S

    def add(self, fetched: int) -> None:
        self._done += fetched
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            log.info(
                "%s: %d%% of %.0f MB from %s",
                *(self._model, 100 * self._done // self._total, self._total / 1e6, self._label),
            )


# ---- from the hub ----


def _from_hub(model: str) -> Obtained:
    began = time.monotonic()
    known = find_known(model)
    if known is not None:
        pull(known)  # also if the file is there and altered
        path = model_path(known)
    else:
        path = ensure(model).path
    is_there = known is None and hub_id(model) is None  # a path: nothing was fetched
    seconds = time.monotonic() - began
    size = 0
    with contextlib.suppress(OSError):
        size = sum(file.stat().st_size for file in model_files(path).values())
    return Obtained(path, LOCAL) if is_there else Obtained(path, HUB, size, seconds)
