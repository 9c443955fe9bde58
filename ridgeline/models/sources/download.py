"""download(): one file from a holder, in parallel ranges, resumed where an earlier try stopped.

The bytes go to a hidden partial file beside the target; the target appears by a rename after size and sha256
were checked. A small file beside it lists the pieces that are complete. The hash follows the pieces while
they arrive. Bytes with another sha256 are discarded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from ridgeline.models.sources.holders import Held, Holder, HolderFailed

PIECE_BYTES = 16 << 20
STREAMS = 4  # ranges at a time
TRIES = 4  # of a piece, at errors that may pass
BUSY_S = 60.0  # longest wait for a holder that says it is busy
_WAIT_S = (0.2, 0.5, 1.0)
_READ_BYTES = 1 << 20
_SUFFIXES = (".partial", ".pieces")

Report = Callable[[int], None]  # bytes that are new


def download(holder: Holder, held: Held, target: Path, report: Report = lambda fetched: None) -> int:
    """Fetch a file. Returns the bytes that were transferred; raises HolderFailed.

    OSError where it cannot be stored. The caller holds a lock on the folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _Partial(target, held)
    was_resumed = bool(partial.complete)
    try:
        return _fetch(holder, held, partial, report)
    except _WrongBytes as error:
        partial.discard()
        if not was_resumed:
            raise HolderFailed(f"{held.name} {error}; nothing of it is used") from None
    # The first part came from an earlier try, perhaps from another holder: once more, from the beginning.
    try:
        return _fetch(holder, held, _Partial(target, held), report)
    except _WrongBytes as error:
        partial.discard()
        raise HolderFailed(f"{held.name} {error}; nothing of it is used") from None


def partial_bytes(target: Path, held: Held) -> int:
    """What an earlier try of this file takes of the disk. Its partial file has holes."""
    try:
        return min(partial_files(target, held)[0].stat().st_blocks * 512, held.bytes)
    except OSError:
        return 0


def remove_partials(folder: Path, wanted: Mapping[Path, Held]) -> None:
    """Remove partial files, except those of `wanted`, by target. The caller holds a lock on the folder."""
    kept = {path for target, held in wanted.items() for path in partial_files(target, held)}
    for suffix in _SUFFIXES:
        for path in folder.rglob(f".*{suffix}"):
            if path not in kept:
                path.unlink(missing_ok=True)


def partial_files(target: Path, held: Held) -> tuple[Path, Path]:
    """The bytes, and the list of complete pieces."""
    data, pieces = (target.with_name(f".{target.name}.{held.sha256[:16]}{suffix}") for suffix in _SUFFIXES)
    return data, pieces


class _WrongBytes(Exception):
    pass


class _Partial:
    """The partial file of one sha256, and the numbers of its complete pieces."""

    def __init__(self, target: Path, held: Held) -> None:
        self.target, self.held = target, held
        self.path, self._list = partial_files(target, held)
        self.count = -(-held.bytes // PIECE_BYTES)
        self.complete = self._read()
        self._lock = threading.Lock()

    def _read(self) -> set[int]:
        """Of an earlier try. Anything odd means that nothing is complete: the hash would notice, late."""
        try:
            size, *numbers = self._list.read_text().split()
            if int(size) != PIECE_BYTES or self.path.stat().st_size != self.held.bytes:
                return set()
            return {int(number) for number in numbers if 0 <= int(number) < self.count}
        except (OSError, ValueError):
            return set()

    def open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self.complete:
            os.truncate(descriptor, 0)
            self._list.write_text(f"{PIECE_BYTES}\n")
        os.truncate(descriptor, self.held.bytes)
        return descriptor

    def bounds(self, piece: int) -> tuple[int, int]:
        return piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.held.bytes)

    def finish(self, piece: int) -> None:
        with self._lock, self._list.open("a") as listed:
            listed.write(f"{piece}\n")

    def keep(self) -> None:
        """The file is verified: give it its name."""
        self.path.replace(self.target)
        self._list.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._list.unlink(missing_ok=True)


def _fetch(holder: Holder, held: Held, partial: _Partial, report: Report) -> int:
    descriptor = partial.open()
    try:
        digest = hashlib.sha256()
        hashed = 0  # pieces
        done = set(partial.complete)
        fetched = 0
        for piece in _arriving(holder, held, partial, descriptor, report):
            start, end = partial.bounds(piece)
            done.add(piece)
            fetched += end - start
            while hashed in done:
                _update(digest, descriptor, *partial.bounds(hashed))
                hashed += 1
        while hashed < partial.count:  # pieces of an earlier try at the end
            _update(digest, descriptor, *partial.bounds(hashed))
            hashed += 1
        if digest.hexdigest() != held.sha256:
            raise _WrongBytes(f"has the sha256 {digest.hexdigest()}, not {held.sha256}")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.keep()
    return fetched


def _arriving(
    holder: Holder, held: Held, partial: _Partial, descriptor: int, report: Report
) -> Iterator[int]:
    """The numbers of missing pieces, as they arrive. After an error the complete ones stay for later."""
    missing = [piece for piece in range(partial.count) if piece not in partial.complete]
    stop = threading.Event()

    def work(piece: int) -> int:
        _piece(holder, held, partial.bounds(piece), descriptor, stop, report)
        partial.finish(piece)
        return piece

    pool = ThreadPoolExecutor(STREAMS, "ridgeline-fetch")
    try:
        waiting: set[Future[int]] = set()
        while missing or waiting:
            while missing and len(waiting) < STREAMS:
                waiting.add(pool.submit(work, missing.pop(0)))
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in ended:
                yield one.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _piece(
    holder: Holder,
    held: Held,
    bounds: tuple[int, int],
    descriptor: int,
    stop: threading.Event,
    report: Report,
) -> None:
    start, end = bounds
    busy_until = time.monotonic() + BUSY_S
    failures = 0
    while True:
        at = start
        try:
            with contextlib.closing(_generator(holder.read(held, start, end))) as chunks:
                for chunk in chunks:
                    if stop.is_set():
                        raise HolderFailed("another range failed")
                    _write_at(descriptor, chunk, at)
                    at += len(chunk)
                    report(len(chunk))
            return
        except HolderFailed as error:
            start = at  # what has come stays
            busy_s = min(error.wait_s, busy_until - time.monotonic())
            is_busy = busy_s > 0
            failures += 0 if is_busy else 1
            if not error.again or failures >= TRIES or stop.is_set():
                raise
            stop.wait(busy_s if is_busy else _WAIT_S[min(failures, len(_WAIT_S)) - 1])


def _generator(chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
    """With a close() that ends the request."""
    yield from chunks


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def _update(digest: hashlib._Hash, descriptor: int, start: int, end: int) -> None:
    while start < end:
        chunk = os.pread(descriptor, min(_READ_BYTES, end - start), start)
        if not chunk:
            raise _WrongBytes("was cut while it was read")
        digest.update(chunk)
        start += len(chunk)
