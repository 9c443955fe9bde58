"""AccessLog: one line per request, made from its ledger row. No bodies unless configured.

A separate thread writes the lines: a slow disk or a full pipe costs lines, which are counted, and never
delays a request.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO

import msgspec

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.options import OptionError

MAX_WAITING = 10_000  # lines
PIPE_BYTES = 4096
BATCH_S = 0.05  # longest delay of a line, to write several at once
NAME_CHARS = 200  # of a client's free text

_encode = msgspec.json.Encoder().encode


class Line(msgspec.Struct, omit_defaults=True):
    """The fields of a line; empty ones are left out."""

    time: str
    request_id: str
    endpoint: str
    status: int
    outcome: str
    total_ms: float
    key_id: str = ""
    team_id: str = ""
    model_asked: str = ""
    model: str = ""
    upstream: str = ""
    upstream_model: str = ""
    credential: str = ""
    stream: bool = False
    error_code: str = ""
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    tokens_reasoning: int = 0
    usage_source: str = ""
    cost_usd: float | None = None
    attempts: int = 0
    cache: str = ""
    similarity: float | None = None
    gateway_ms: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    stream_ms: float | None = None
    trace_id: str = ""
    route: msgspec.Raw | None = None  # JSON already
    guard: msgspec.Raw | None = None
    request: str = ""
    answer: str = ""
    repeats: int = 0


class AccessLog:
    def __init__(self, config: ObserveConfig, stream: BinaryIO | None = None) -> None:
        """`stream`: overrides the config's destination."""
        self.dropped = 0
        self._config = config
        self._off = config.access_log == "off" and stream is None
        self._lines: list[bytes] = []
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._own = stream is None and config.access_log not in ("off", "stderr")
        if self._off:
            return
        self._stream = stream or _opened(config.access_log)
        is_text = config.access_log_format == "text" or (
            config.access_log_format == "auto" and self._stream.isatty()
        )
        self._format = _text if is_text else _encode
        self._thread = threading.Thread(target=self._write_lines, name="access-log", daemon=True)
        self._thread.start()

    @property
    def wants_bodies(self) -> bool:
        return self._config.log_bodies and not self._off

    def write(self, row: LedgerRow, trace_id: str = "", request: bytes = b"", answer: bytes = b"") -> None:
        """request, answer: after the guard; used only if bodies are logged."""
        if self._off:
            return
        if len(self._lines) >= MAX_WAITING:
            self.dropped += 1
            return
        line = _line(row)
        line.trace_id = trace_id
        if self._config.log_bodies:
            line.request = _excerpt(request, self._config.log_body_bytes)
            line.answer = _excerpt(answer, self._config.log_body_bytes)
        self._lines.append(self._format(line))
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write the waiting lines. Gives up on a stream that blocks."""
        if self._off or self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout=2.0)

    def _write_lines(self) -> None:
        last = False
        while not last:
            self._wake.wait()
            self._closed.wait(BATCH_S)
            self._wake.clear()
            last = self._closed.is_set()  # read after clearing: a later close sets the event again
            # Remove only the counted lines: the event loop may append in between.
            count = len(self._lines)
            lines = self._lines[:count]
            if lines:
                self._write_whole(lines)
            del self._lines[:count]
        if self._own:
            self._stream.close()

    def _write_whole(self, lines: list[bytes]) -> None:
        written = 0
        try:
            for group in _groups(lines):
                self._stream.write(b"\n".join(group) + b"\n")
                self._stream.flush()
                written += len(group)
        except (OSError, ValueError):  # a full disk, a closed pipe
            self.dropped += len(lines) - written


def _groups(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Chunks of lines that a pipe writes atomically: workers that share a pipe do not mix their lines."""
    group: list[bytes] = []
    size = 0
    for line in lines:
        if group and size + len(line) + 1 > PIPE_BYTES:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line) + 1
    if group:
        yield group


def _line(row: LedgerRow) -> Line:
    return Line(
        _clock(row.at_ms),
        row.request_id,
        row.endpoint,
        row.status,
        row.outcome,
        round(row.total_ms, 3),
        row.key_id,
        row.team_id,
        _harmless(row.model_asked),
        row.model,
        row.upstream,
        row.upstream_model,
        row.credential,
        row.stream,
        row.error_code,
        row.tokens_in,
        row.tokens_cached,
        row.tokens_out,
        row.tokens_reasoning,
        "" if row.usage_source == "none" else row.usage_source,
        row.cost_pusd / 1e12 if row.cost_pusd else None,
        row.attempts,
        row.cache,
        row.similarity,
        _rounded(row.gateway_ms),
        _rounded(row.queue_ms),
        _rounded(row.ttft_ms),
        _rounded(row.stream_ms),
        route=msgspec.Raw(row.route.encode()) if row.route else None,
        guard=msgspec.Raw(row.guard.encode()) if row.guard else None,
        repeats=row.repeats,
    )


_last_second: tuple[int, str] = (0, "")


def _clock(at_ms: int) -> str:
    global _last_second
    second, rest = divmod(at_ms, 1000)
    if _last_second[0] != second:
        _last_second = (second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    return f"{_last_second[1]}.{rest:03d}Z"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _harmless(name: str) -> str:
    """A client's text, shortened, without line ends and terminal control characters."""
    if len(name) > NAME_CHARS:
        name = name[:NAME_CHARS] + "…"
    return name if name.isascii() and name.isprintable() else json.dumps(name)[1:-1]


def _excerpt(body: bytes, limit: int) -> str:
    text = body[:limit].decode("utf-8", "replace")
    return f"{text}… ({len(body)} bytes)" if len(body) > limit else text


def _text(line: Line) -> bytes:
    """For people: 12:34:56.789 200 ok chat small 812.4 ms  in=12 out=40 …"""
    fields = msgspec.structs.asdict(line)
    head = [fields.pop("time")[11:-1], str(fields.pop("status")), fields.pop("outcome")]
    head += [fields.pop("endpoint"), fields.pop("model") or fields.pop("model_asked") or "-"]
    head.append(f"{fields.pop('total_ms'):.1f} ms")
    rest = " ".join(f"{name}={_readable(value)}" for name, value in fields.items() if value)
    return f"{' '.join(head)}  {rest}".encode()


def _readable(value: object) -> str:
    if isinstance(value, msgspec.Raw):
        value = bytes(value).decode()
    text = str(value)
    if text and text.isascii() and text.isprintable() and not any(c in ' "=' for c in text):
        return text
    return json.dumps(text)


def _opened(place: str) -> BinaryIO:
    if place == "stderr":
        return sys.stderr.buffer
    try:
        return open(place, "ab")
    except OSError as error:
        raise OptionError(f"[observe] access_log {place}: {error.strerror}") from error
