"""SharedFiles: what a replica gives to its peers: the files of its model, and its packed weights or kernels.

Files are named by sha256 alone, so that no request can name a path. Reading and hashing are threads' work;
the event loop only passes on chunks, at a limited rate while requests run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.models.errors import ModelError
from ridgeline.models.sources.archive import Archive
from ridgeline.models.sources.manifest import Manifest
from ridgeline.models.sources.model_files import manifest_of
from ridgeline.server.served_models import Model, ServedModels

log = logging.getLogger("ridgeline.server")

CHUNK_BYTES = 256 << 10  # about 0.1 ms of the event loop
LINGER_S = 5.0  # a peer between two ranges still has its place
OFFER_S = 10.0  # for which an offer is not looked up again
OFFERS_KEPT = 4  # archives: a transfer that began with an older one may finish
_reading = ThreadPoolExecutor(2, "ridgeline-share")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Bytes by range. OSError where the file has changed since it was hashed."""

    size: int
    read: Callable[[int, int], bytes]


class SharedFiles:
    def __init__(self, served_models: ServedModels) -> None:
        config = served_models.config
        self._models = served_models.models
        self.places = Places(config.share_transfers)
        self.pace = Pace(config.share_mb_per_s * 1e6, self._is_busy)
        self._offers = {model.names[0]: _Offer(model) for model in self._models}

    async def manifest(self, model: Model) -> Manifest:
        return await self._offers[model.names[0]].manifest()

    def find(self, sha256: str) -> SharedFile | None:
        found = (offer.files.get(sha256) for offer in self._offers.values())
        return next((one for one in found if one is not None), None)

    def _is_busy(self) -> bool:
        clients = [model.engine.client for model in self._models]
        return any(client is not None and client.open_requests > 0 for client in clients)


class _Offer:
    """The files of one model. Looked up when a peer asks: most replicas are never asked."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = asyncio.Lock()
        self._manifest: Manifest | None = None
        self._made_at = 0.0
        self.files: dict[str, SharedFile] = {}
        self._archive: Archive | None = None  # the last one: hashed once while its files stay the same
        self._archives: dict[str, SharedFile] = {}  # the newest last

    async def manifest(self) -> Manifest:
        async with self._lock:
            if self._manifest is None or time.monotonic() - self._made_at > OFFER_S:
                loop = asyncio.get_running_loop()
                self._manifest = await loop.run_in_executor(_reading, self._made)
                self._made_at = time.monotonic()
            return self._manifest

    def _made(self) -> Manifest:
        from ridgeline.engine.caches.shipping import held_cache, offered  # a server without peers needs none

        held = self._model.files
        assert held is not None
        manifest, paths = manifest_of(held.source, held.path)
        files = {sha256: _file(path) for sha256, path in paths.items()}
        try:
            archive = offered(held.path, held.engine, self._archive)
        except (OSError, ModelError) as error:
            log.warning("packed weights or kernels cannot be shared: %s", error)
            archive = None
        self._archive = archive
        if archive is not None:
            self._archives.pop(archive.sha256, None)
            self._archives[archive.sha256] = SharedFile(archive.size, archive.read)
            while len(self._archives) > OFFERS_KEPT:
                del self._archives[next(iter(self._archives))]
            manifest = msgspec.structs.replace(manifest, caches=(held_cache(archive),))
        self.files = {**self._archives, **files}
        return manifest


def _file(path: Path) -> SharedFile:
    stat = path.stat()
    hashed = (stat.st_size, stat.st_mtime_ns)

    def read(start: int, size: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(size)
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != hashed or len(data) != min(size, hashed[0] - start):
            raise OSError(f"{path} has changed")
        return data

    return SharedFile(stat.st_size, read)


class Places:
    """Peers that fetch now. A peer has several ranges at a time, and pauses between files."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[str, int] = {}
        self._seen: dict[str, float] = {}

    def enter(self, peer: str) -> bool:
        """False: all places are taken by others."""
        now = time.monotonic()
        for name in [name for name, at in self._seen.items() if now - at > LINGER_S and not self._open[name]]:
            del self._seen[name], self._open[name]
        if peer not in self._seen and len(self._seen) >= self._most:
            return False
        self._seen[peer] = now
        self._open[peer] = self._open.get(peer, 0) + 1
        return True

    def leave(self, peer: str) -> None:
        self._open[peer] -= 1
        self._seen[peer] = time.monotonic()


class Pace:
    """Spreads the bytes of all transfers over time while the server is busy. An idle server has no limit."""

    def __init__(self, bytes_per_s: float, is_busy: Callable[[], bool]) -> None:
        self._rate, self._is_busy = bytes_per_s, is_busy
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until this many bytes may be sent."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now)
        if not self._is_busy():
            self._free_at = now
            return
        wait = self._free_at - now
        self._free_at += size / self._rate
        if wait > 0:
            await asyncio.sleep(wait)


async def read_chunk(file: SharedFile, start: int, size: int) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(_reading, file.read, start, size)
