"""TrafficRecorder: writes each ended request to a file: arrival time, lengths and hashes. No content, unless
the operator asks for the texts.

One JSON line per request, with the fields of Mooncake's traces and blocks of 64 tokens; `ridgeline bench`
replays it, and `ridgeline quantize` calibrates with the texts. The event loop passes only references: a
thread hashes and writes. If the thread falls behind or the file is full, requests are dropped from the
recording rather than delayed.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ridgeline.options import OptionError
from ridgeline.telemetry.clock import wall_offset_ns

log = logging.getLogger("ridgeline.server")

BLOCK_TOKENS = 64  # four KV blocks: fine enough to model cache hits, with shorter lines
BLOCKS_AT_ONCE = 128  # hashed in well under a millisecond
WAITING_TOKENS = 2_000_000  # of prompts queued for the thread; about 70 MB
CLOSE_S = 5.0
_ID_BITS = 53  # integers that every JSON reader represents exactly


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One choice of a request: its prompt, and the length of its output."""

    arrival: float  # time.monotonic()
    prompt: list[int]
    output_tokens: int
    endpoint: str
    model: str
    cache_namespace: str
    end: str  # why: "stop", "length", "abort", …
    text: Callable[[], str] | None = None  # prompt and output; called by the thread, if texts are recorded


class _Line(msgspec.Struct, omit_defaults=True):
    timestamp: float  # milliseconds since `began`
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int
    endpoint: str
    model: str
    end: str
    began: float  # of the file: Unix seconds, so that a restarted server can continue it
    text: str = ""


class TrafficRecorder:
    """Close it when the server ends. `add` is called from one thread only and never blocks."""

    def __init__(self, path: Path, max_bytes: int, texts: bool = False) -> None:
        """texts: also record prompts and outputs, which are the users' content."""
        self.texts = texts
        self._path = path
        self._max_bytes = max_bytes
        # Never stored: without it the hashes cannot be matched with guessed prompts.
        self._salt = secrets.token_bytes(32)
        self._file, self._began = _opened(path)
        self._bytes = self._file.tell()
        self._wall_of_monotonic = wall_offset_ns() / 1e9
        self._queue: queue.SimpleQueue[EndedRequest | None] = queue.SimpleQueue()
        self._added_tokens = 0  # by the caller
        self._done_tokens = 0  # by the thread
        self.unrecorded = 0
        self._thread = threading.Thread(target=self._write_all, name="ridgeline-recorder", daemon=True)
        self._thread.start()
        if texts:
            log.warning(
                "record_texts: %s gets the texts of prompts and answers, which are users' content. Tell the "
                "users, and delete the file when it has served its purpose",
                path,
            )

    def add(self, ended: EndedRequest) -> None:
        if self._added_tokens - self._done_tokens > WAITING_TOKENS or not self._thread.is_alive():
            self.unrecorded += 1
            return
        self._added_tokens += _tokens(ended)
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
                        log.warning("%s has reached %d bytes; recording has stopped", self._path, self._bytes)
                        return
                    file.write(line)
                    self._bytes += len(line)
                    self._done_tokens += _tokens(ended)
                    if self._queue.empty():
                        file.flush()
            except OSError as error:
                log.error("%s cannot be written: %s; recording has stopped", self._path, error)

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
            text=ended.text() if self.texts and ended.text is not None else "",
        )

    def _hashes(self, ended: EndedRequest) -> list[int]:
        """Of every block, together with all before it: equal hash = equal prompt up to there. The last block
        may be shorter. Hashes differ between models and cache namespaces, which share no blocks.
        """
        owner = f"{ended.model}\0{ended.cache_namespace}".encode("utf-8", "surrogatepass")
        chained = hashlib.blake2b(owner, key=self._salt, digest_size=32)
        tokens = array("Q", ended.prompt)
        found: list[int] = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            chained.update(tokens[start : start + BLOCK_TOKENS].tobytes())
            if len(found) % BLOCKS_AT_ONCE == BLOCKS_AT_ONCE - 1:
                time.sleep(0)  # yields the GIL to the event loop, which would otherwise wait 5 ms
            found.append(int.from_bytes(chained.copy().digest()[:8], "little") >> (64 - _ID_BITS))
        return found


def _tokens(ended: EndedRequest) -> int:
    return len(ended.prompt) + ended.output_tokens + 1


def _opened(path: Path) -> tuple[BinaryIO, float]:
    """The file, opened for appending, and its start time; any other file is left unchanged."""
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
        raise OptionError(
            f"record_traffic: {path} exists and is not a recording; name another file"
        ) from None
    return file, began
