"""TrafficRecorder: which requests came when, written to a file as they end; lengths and hashes, no content.

One JSON line for each, with the fields of Mooncake's traces and blocks of 64 tokens; `ridgeline bench`
replays it. The event loop hands over references alone: hashing and writing are a thread's, and when that
falls behind, or the file is full, requests go unrecorded rather than slowly.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ridgeline.options import OptionError

log = logging.getLogger("ridgeline.server")

BLOCK_TOKENS = 64  # four KV blocks: fine enough for what a cache would find, a tenth of the lines' length
BLOCKS_AT_ONCE = 128  # hashed in well under a millisecond
WAITING_TOKENS = 2_000_000  # of prompts that are kept for the thread; about 70 MB
CLOSE_S = 5.0
_ID_BITS = 53  # what every JSON reader takes for an integer


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One choice of a request: its prompt, and how much was written for it."""

    arrival: float  # time.monotonic()
    prompt: list[int]
    output_tokens: int
    endpoint: str
    model: str
    cache_namespace: str
    end: str  # why: "stop", "length", "abort", …


class _Line(msgspec.Struct):
    timestamp: float  # milliseconds since `began`
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int
    endpoint: str
    model: str
    end: str
    began: float  # of the file: seconds since 1970, so that a restarted server can go on with it


class TrafficRecorder:
    """Close it when the server ends. `add` is called from one thread alone, and never waits."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        # Never written anywhere: without it nobody can try out which prompt has a hash.
        self._salt = secrets.token_bytes(32)
        self._file, self._began = _opened(path)
        self._bytes = self._file.tell()
        self._wall_of_monotonic = time.time() - time.monotonic()
        self._queue: queue.SimpleQueue[EndedRequest | None] = queue.SimpleQueue()
        self._added_tokens = 0  # by the caller
        self._done_tokens = 0  # by the thread
        self.unrecorded = 0
        self._thread = threading.Thread(target=self._write_all, name="ridgeline-recorder", daemon=True)
        self._thread.start()

    def add(self, ended: EndedRequest) -> None:
        if self._added_tokens - self._done_tokens > WAITING_TOKENS or not self._thread.is_alive():
            self.unrecorded += 1
            return
        self._added_tokens += len(ended.prompt) + 1
        self._queue.put(ended)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self.unrecorded:
            log.warning("%d requests were not recorded in %s", self.unrecorded, self._path)

    def _write_all(self) -> None:
        with self._file as file:
            try:
                while (ended := self._queue.get()) is not None:
                    line = msgspec.json.encode(self._line(ended)) + b"\n"
                    if self._bytes + len(line) > self._max_bytes:
                        log.warning("%s has %d bytes: no more traffic is recorded", self._path, self._bytes)
                        return
                    file.write(line)
                    self._bytes += len(line)
                    self._done_tokens += len(ended.prompt) + 1
                    if self._queue.empty():
                        file.flush()
            except OSError as error:
                log.error("%s cannot be written: %s; no more traffic is recorded", self._path, error)

    def _line(self, ended: EndedRequest) -> _Line:
        since_s = ended.arrival + self._wall_of_monotonic - self._began
        return _Line(
            timestamp=round(max(since_s, 0.0) * 1000, 3),
            input_length=len(ended.prompt),
            output_length=ended.output_tokens,
            hash_ids=self._hashes(ended),
            block_tokens=BLOCK_TOKENS,
            endpoint=ended.endpoint,
            model=ended.model,
            end=ended.end,
            began=self._began,
        )

    def _hashes(self, ended: EndedRequest) -> list[int]:
        """Of every block, together with all before it: equal hash = equal prompt up to there. The last block
        may be shorter. Other models and cache namespaces share nothing, so their hashes differ too.
        """
        owner = f"{ended.model}\0{ended.cache_namespace}".encode("utf-8", "surrogatepass")
        chained = hashlib.blake2b(owner, key=self._salt, digest_size=32)
        tokens = array("Q", ended.prompt)
        found: list[int] = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            chained.update(tokens[start : start + BLOCK_TOKENS].tobytes())
            if len(found) % BLOCKS_AT_ONCE == BLOCKS_AT_ONCE - 1:
                time.sleep(0)  # lets the event loop have the interpreter, which waits for 5 ms otherwise
            found.append(int.from_bytes(chained.copy().digest()[:8], "little") >> (64 - _ID_BITS))
        return found


def _opened(path: Path) -> tuple[BinaryIO, float]:
    """The file, to be added to, and when it began; a file that is no recording is left alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.time()
        if path.exists() and path.stat().st_size:
            with path.open("rb") as written:
                began = msgspec.json.decode(written.readline(), type=_Line).began
        file = path.open("ab")
        path.chmod(0o600)
    except OSError as error:
        raise OptionError(f"record_traffic: {path} cannot be written: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise OptionError(f"record_traffic: {path} is there and is no recording; name another file") from None
    return file, began
