"""Journal: an append-only file of records, each with its length and checksum, written by one thread.

Appends that come together share one fsync. A record that a crash left incomplete is moved to a file beside
the journal when it is opened. `DurableQueue` is the only caller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

MAGIC = b"ridgeline held 1\n"
HEAD = 8  # bytes before each record: its length and its CRC-32
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # there may be room again later
MAX_RECORD = 256 * 1024 * 1024

log = logging.getLogger(__name__)


class JournalError(Exception):
    """The journal cannot be used. The message names the file and says what to do."""


class Journal:
    """One process at a time: the file is locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self._beside.unlink(missing_ok=True)  # of a rewrite that was killed
        self.records = self._recover()  # of the file as it was opened; the owner reads and drops them
        self.size = self._written = os.lseek(self._file, 0, os.SEEK_END)
        self._condition = threading.Condition()
        self._queue: list[tuple[bytes, Future[None]]] = []
        self._replacement: tuple[list[bytes], Future[None]] | None = None
        self._failed: OSError | None = None
        self._closing = False
        self._is_folder_synced = True  # False: the file is not yet certain to have its name after a crash
        self.syncs = 0
        self._thread = threading.Thread(target=self._write_all, name="fleet-journal", daemon=True)
        self._thread.start()

    @property
    def _beside(self) -> Path:
        return self.path.with_suffix(".new")

    def append(self, record: bytes) -> Future[None]:
        """The future is done when the record is on the disk; JournalError if it cannot be written."""
        future = _uncancelled()
        framed = frame(record)
        with self._condition:
            if self._is_refused(future):
                return future
            self.size += len(framed)
            self._queue.append((framed, future))
            self._condition.notify()
        return future

    def rewrite(self, records: Iterable[bytes]) -> Future[None]:
        """Replace the whole file by these records, with one rename. Earlier appends are dropped."""
        future = _uncancelled()
        framed = [frame(record) for record in records]
        with self._condition:
            if self._is_refused(future):
                return future
            pending, self._queue = self._queue, []
            if self._replacement is not None:  # an earlier rewrite that was not written yet
                pending.append((b"", self._replacement[1]))
            self._replacement = (framed, future)
            self.size = len(MAGIC) + sum(map(len, framed))
            for _, waiting in pending:  # their effect is in `records`
                future.add_done_callback(partial(_copy, waiting))
            self._condition.notify()
        return future

    def _is_refused(self, future: Future[None]) -> bool:
        if self._failed is None and not self._closing:
            return False
        future.set_exception(JournalError(f"{self.path}: {self._failed or 'the journal is closed'}"))
        return True

    def close(self) -> None:
        """Write the remaining records, and unlock the file."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ── the writing thread ───────────────────────────────────────────────────────────────────────────────

    def _write_all(self) -> None:
        while True:
            with self._condition:
                while not (self._queue or self._replacement or self._closing):
                    self._condition.wait()
                if not (self._queue or self._replacement):
                    return
                batch, self._queue = self._queue, []
                replacement, self._replacement = self._replacement, None
            futures = [future for _, future in batch]
            try:
                if replacement is not None:
                    futures.append(replacement[1])
                    self._replace(replacement[0])
                if not self._is_folder_synced:
                    _sync_folder(self.path.parent)
                    self._is_folder_synced = True
                if replacement is not None:  # it is done, even if the appends after it fail
                    futures.pop().set_result(None)
                if batch:
                    _write(self._file, b"".join(framed for framed, _ in batch))
                    os.fdatasync(self._file)
                self.syncs += 1
            except OSError as error:
                if not self._cut_back(error):
                    with self._condition:
                        self._failed = error
                        futures += [future for _, future in self._queue]
                        self._queue.clear()
                    log.error("%s cannot be written: no further request is journalled: %s", self.path, error)
                for future in futures:
                    future.set_exception(JournalError(f"{self.path}: {error.strerror}"))
                continue
            self._written = os.lseek(self._file, 0, os.SEEK_END)
            self._measure()
            for future in futures:
                future.set_result(None)

    def _cut_back(self, error: OSError) -> bool:
        """After a full disk: remove the part that was written. True: later appends may work again."""
        if error.errno not in FULL:
            return False
        try:
            os.ftruncate(self._file, self._written)
            os.fsync(self._file)
        except OSError:
            return False
        self._measure()
        log.error("%s: records were not written: %s", self.path, error.strerror)
        return True

    def _measure(self) -> None:
        """Set `size`: the file with what still waits to be written."""
        with self._condition:
            size = self._written
            if self._replacement is not None:
                size = len(MAGIC) + sum(map(len, self._replacement[0]))
            self.size = size + sum(len(framed) for framed, _ in self._queue)

    def _replace(self, framed: list[bytes]) -> None:
        """After the rename the new file is the journal, whatever fails later."""
        beside = self._beside
        new = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(new, MAGIC + b"".join(framed))
            os.fsync(new)
            size = os.lseek(new, 0, os.SEEK_END)
            beside.replace(self.path)
        except OSError:
            os.close(new)
            with contextlib.suppress(OSError):
                beside.unlink()  # the disk may be full
            raise
        old, self._file, self._written = self._file, new, size
        self._is_folder_synced = False
        os.close(old)

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> list[bytes]:
        data = _read(self._file)
        if not data or MAGIC.startswith(data):
            os.ftruncate(self._file, 0)
            _write(self._file, MAGIC)
            os.fsync(self._file)
            _sync_folder(self.path.parent)
            return []
        if not data.startswith(MAGIC):
            os.close(self._file)
            raise JournalError(f"{self.path} is not a journal of held requests: move it away")
        records, end = split(data)
        if end < len(data):
            rest = data[end:]
            damaged = self.path.with_suffix(".damaged")
            damaged.write_bytes(rest)
            log.warning(
                "%s: %d bytes after record %d are incomplete, as after a crash; moved to %s",
                self.path, len(rest), len(records), damaged.name,
            )  # fmt: skip
            os.ftruncate(self._file, end)
            os.fsync(self._file)
        return records


def frame(record: bytes) -> bytes:
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


def split(data: bytes) -> tuple[list[bytes], int]:
    """The complete records from the beginning, and the offset at which the last of them ends."""
    records, at = [], len(MAGIC)
    while at + HEAD <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        record = data[at + HEAD : at + HEAD + length]
        checksum = int.from_bytes(data[at + 4 : at + HEAD], "little")
        if length > MAX_RECORD or len(record) < length or zlib.crc32(record) != checksum:
            break
        records.append(record)
        at += HEAD + length
    return records, at


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise JournalError(f"{path} is in use by another process: each router needs its own") from error
    return file


def _read(file: int) -> bytes:
    parts = []
    os.lseek(file, 0, os.SEEK_SET)
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write(file: int, data: bytes) -> None:
    os.lseek(file, 0, os.SEEK_END)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _uncancelled() -> Future[None]:
    """A future that a waiting task cannot cancel: the writing thread sets its result."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _copy(waiting: Future[None], done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
