"""Spool: one upload on disk; no upload is ever in memory as a whole.

Files are in the worker's own folder below state_dir. The supervisor removes it when the worker has ended, and
removes the folders of earlier gateways when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import threading
from pathlib import Path

from ridgeline.gateway.errors import Unavailable
from ridgeline.gateway.limits.held_bytes import Held, HeldBytes

WRITE_BYTES = 1 << 20  # collected before a thread writes them


def uploads_path(state_dir: Path, worker: str) -> Path:
    """The worker's folder. `worker`: number and process id. In a reload, two workers share a number."""
    return state_dir / "uploads" / worker


def remove_stale_uploads(state_dir: Path) -> None:
    """Remove the folders of workers that have ended. A worker whose supervisor was killed may still drain."""
    for folder in (state_dir / "uploads").glob("*"):
        if not _runs(folder.name.partition("-")[2]):
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError):
        return False
    return True


class Spools:
    """The folder of one worker, and the limit on its bytes."""

    def __init__(self, folder: Path, held: HeldBytes) -> None:
        self.held = held
        self._folder = folder

    def spool(self, key_id: str) -> Spool:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Spool(self._folder / secrets.token_hex(8), self.held.hold(key_id))


class Spool:
    def __init__(self, path: Path, held: Held) -> None:
        """held: counted by the caller as bytes arrive, released at the end."""
        self.path, self.held = path, held
        self.size = 0  # including bytes not written yet
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()  # a closed descriptor may be another file's by the next read
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def add(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self.size += len(data)

    async def flush(self, all_of_it: bool = True) -> None:
        """Write the added bytes; without `all_of_it` only if there are enough for a thread."""
        if self._pending_bytes >= (1 if all_of_it else WRITE_BYTES):
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            try:
                await asyncio.to_thread(self._write, pending)
            except OSError as error:
                message = f"the upload could not be written to disk ({error.strerror})"
                raise Unavailable(message, status=507, code="no_disk_space") from None

    def read(self, begin: int, size: int) -> bytes:
        """Read `size` bytes that were written before; called in a thread."""
        with self._lock:
            if self._file < 0:
                raise OSError("the upload has ended")
            return os.pread(self._file, size, begin)

    def written_elsewhere(self) -> None:
        """Another process has written to the file by its path."""
        self.size = self.path.stat().st_size

    def close(self) -> None:
        """Release its bytes now; a thread removes the file, which is slow for a large one."""
        self.held.release()
        threading.Thread(target=self._remove, name="spool-remove").start()

    def _remove(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                with contextlib.suppress(FileNotFoundError):
                    self.path.unlink()

    def _write(self, pending: list[bytes]) -> None:
        with self._lock:
            if self._file >= 0:
                for data in pending:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(self._file, view) :]
