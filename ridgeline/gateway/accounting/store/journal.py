"""Journal: one worker's write-ahead files, appended to by its event loop. JournalReader: reads them in order.

A journal is a folder with a lock that its process holds for life, and numbered segments. A process that gets
the lock knows that the writer is dead, and owns the folder from then on. Segments are self-contained:
openings that are still open when one ends are written again into the next, so that an old segment can be
removed as soon as its rows are in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.store.records import line_of

_LOCK = "lock"
_SEGMENT = re.compile(r"(\d{10})\.wal")
_CHUNK = 256 << 10  # read at once: more than any record
_ALIVE_S = 0.5
_TRIAL_BYTES = 4096  # a file system's block: fewer bytes could fit into an existing one

logger = logging.getLogger("ridgeline.gateway.ledger")


class Journal:
    """Appends; never reads. Only the thread of the event loop calls it."""

    def __init__(self, root: Path, worker: str, segment_bytes: int, fsync: str = "off") -> None:
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', worker)}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # Locked before it gets its name: a folder of a living writer is always locked.
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        hidden = root / f".{name}"
        hidden.mkdir(mode=0o700)
        self._lock = lock_of(hidden)
        self.folder = root / name
        hidden.rename(self.folder)
        self.number = 0  # of the current segment; read by the mover's thread
        self.written = 0  # bytes, in all segments
        self._fsync = fsync  # off, interval, always: see LedgerConfig
        self._unsynced: deque[int] = deque()  # ended segments; closed by the thread that syncs them
        self._segment_bytes = segment_bytes
        self._open: dict[str, bytes] = {}
        self._mend = b""
        self._fd = -1
        self._size = 0
        self._rotate_at = segment_bytes
        self._alive_until = 0.0
        self._rotate()

    @property
    def unfinished(self) -> int:
        return len(self._open)

    def append_opening(self, opening: Opening) -> None:
        """OSError if it could not be written; the request's row may still be written."""
        line = self._open[opening.request_id] = line_of(opening)
        self._append(line)

    def append_row(self, row: LedgerRow) -> None:
        self._open.pop(row.request_id, None)
        self._append(line_of(row))
        if self._fsync == "always":
            os.fdatasync(self._fd)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def try_write(self) -> None:
        """Write empty lines, which readers skip: OSError while the file cannot grow."""
        self._append(b"\n" * _TRIAL_BYTES)

    def mark_alive(self) -> None:
        """Called at intervals by the mover's thread: the lock's time is the worker's last sign of life."""
        now = time.monotonic()
        if now >= self._alive_until:
            self._alive_until = now + _ALIVE_S
            os.utime(self._lock)

    def sync(self) -> None:
        """Called at intervals by the mover's thread."""
        if self._fsync == "off":
            return
        while self._unsynced:
            ended = self._unsynced.popleft()
            os.fdatasync(ended)
            os.close(ended)
        written = self._fd  # stays open when its segment ends: only this thread closes it
        if written >= 0:
            os.fdatasync(written)

    def end(self) -> None:
        """Stop writing; the lock stays until `release`."""
        ended, self._fd = self._fd, -1
        self._retire(ended)

    def release(self, remove: bool) -> None:
        """Give the folder up: remove it, or leave it for another worker."""
        self.end()
        self.sync()
        if remove:
            remove_folder(self.folder)
        os.close(self._lock)

    def _append(self, line: bytes) -> None:
        data = self._mend + line
        count = os.write(self._fd, data)
        self._size += count
        self.written += count
        if count < len(data):
            self._mend = b"\n"  # ends the torn record, so that the next one starts a new line
            raise OSError(28, "only a part of a record was written to the write-ahead file")
        self._mend = b""
        if self._size >= self._rotate_at:
            try:
                self._rotate()
            except OSError as error:
                self._rotate_at = self._size + self._segment_bytes
                logger.error("cannot create the ledger's next write-ahead file: %s", error.strerror)

    def _rotate(self) -> None:
        path = segment_path(self.folder, self.number + 1)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        carried = b"".join(self._open.values())
        try:
            if carried and os.write(fd, carried) < len(carried):
                raise OSError(28, "no space left on the device")
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        old, self._fd = self._fd, fd
        self._size, self._mend = len(carried), b""
        self.written += len(carried)
        self._rotate_at = len(carried) + self._segment_bytes
        # From here on the mover's thread may finish the old segment: no more is written to it.
        self.number += 1
        self._retire(old)

    def _retire(self, fd: int) -> None:
        if fd >= 0 and self._fsync == "off":
            os.close(fd)
        elif fd >= 0:
            self._unsynced.append(fd)


class JournalReader:
    """Reads a journal's lines in order, once each. With `live`, it follows a writer of this process; without,
    the writer is dead, and an incomplete last line was never complete.
    """

    def __init__(self, folder: Path, live: Journal | None = None) -> None:
        self.folder = folder
        self._live = live
        self._numbers = iter(segment_numbers(folder)) if live is None else None
        self._number = 0
        self._fd = -1
        self._offset = 0
        self._passed: list[Path] = []
        self.removed = 0  # bytes
        self.exhausted = False  # of a dead writer: end reached
        self.is_behind = False  # more was available than one read returns
        self._advance()

    def next_lines(self) -> list[bytes]:
        """The next complete lines of one segment; empty if there are none (yet)."""
        while self._fd >= 0:
            # Checked before the file is read: a segment that has already ended is read to its end.
            ended = self._live is None or self._live.number > self._number
            data = os.pread(self._fd, _CHUNK, self._offset)
            self.is_behind = ended or len(data) == _CHUNK
            whole = data.rfind(b"\n") + 1
            if whole:
                self._offset += whole
                return [line for line in data[:whole].split(b"\n") if line]
            if len(data) == _CHUNK:
                logger.error("%s: skipped %d bytes without a record", self._path, _CHUNK)
                self._offset += _CHUNK
            elif not ended:
                break
            else:
                if data and self._live is not None:
                    logger.error("%s: its last record is torn", self._path)
                self._advance()
        return []

    def remove_passed(self) -> None:
        """Remove segments that were read to their end; call it when all their rows are in the store."""
        for path in self._passed:
            with contextlib.suppress(FileNotFoundError):
                self.removed += path.stat().st_size
                path.unlink()
        self._passed.clear()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _path(self) -> Path:
        return segment_path(self.folder, self._number)

    def _advance(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._passed.append(self._path)
        following = self._number + 1 if self._numbers is None else next(self._numbers, None)
        if following is None:
            self.exhausted = True
            return
        self._number, self._offset = following, 0
        self._fd = os.open(self._path, os.O_RDONLY)


def lock_of(folder: Path) -> int:
    """The folder's lock, as a descriptor that holds it; BlockingIOError while its writer lives."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def journals(root: Path) -> list[Path]:
    """Every journal's folder under `root`, of living and dead writers."""
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        return []


def orphans(root: Path, known: set[Path]) -> Iterator[tuple[Path, int]]:
    """Folders whose writer is dead, with their lock, which the caller now holds."""
    for folder in journals(root):
        if folder not in known:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                yield folder, lock_of(folder)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:010d}.wal"


def segment_numbers(folder: Path) -> list[int]:
    names = (_SEGMENT.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def last_alive_ms(folder: Path) -> int:
    """When its worker last wrote there, unix milliseconds."""
    return int(max((path.stat().st_mtime for path in folder.iterdir()), default=0.0) * 1000)


def remove_folder(folder: Path) -> None:
    for number in segment_numbers(folder):
        segment_path(folder, number).unlink()
    with contextlib.suppress(FileNotFoundError):
        (folder / _LOCK).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
