"""A batch without a server's store: sends the lines of one file and appends their answers to another.

Called by `ridgeline batch`. After a stop, the output file is the only state: lines answered there are not
sent again, and a partial last line is removed first. Holds at most as many bodies as are in flight.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ridgeline.server.batches.answering import LineSender, answer_line
from ridgeline.server.batches.bodies import Line
from ridgeline.server.batches.inner import Reply
from ridgeline.server.batches.lines import BadLine, raw_lines, read_line

MAX_LINE_BYTES = 8 << 20
SHOWN_ERRORS = 5
_PLAIN_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


class BadInput(Exception):
    """Invalid lines; the message names the first of them."""


@dataclass(frozen=True, slots=True)
class PreparedLine:
    """One line, ready to be sent."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(slots=True)
class Figures:
    """Work done since the start; tokens as reported in the answers' usage."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Used(msgspec.Struct):
    usage: _Usage | None = None


class _Named(msgspec.Struct):
    custom_id: str


_used = msgspec.json.Decoder(_Used)
_named = msgspec.json.Decoder(_Named)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_lines(path: Path) -> set[str]:
    """The custom ids of a valid input; raises BadInput otherwise."""
    seen: dict[str, int] = {}
    errors: list[str] = []
    for number, _, raw in raw_lines(path, MAX_LINE_BYTES):
        try:
            line = _line(number, raw)
            if line.custom_id in seen:
                raise BadLine(
                    "", f"the custom_id {line.custom_id!r} is also that of line {seen[line.custom_id]}"
                )
            seen[line.custom_id] = number
        except BadLine as error:
            errors.append(f"line {number}: {error.message}")
    if errors:
        more = len(errors) - SHOWN_ERRORS
        shown = errors[:SHOWN_ERRORS] + ([f"and {more} more"] if more > 0 else [])
        raise BadInput(f"{path} has invalid lines:\n  " + "\n  ".join(shown))
    if not seen:
        raise BadInput(f"{path} has no lines")
    return set(seen)


def prepared_lines(path: Path, change: Callable[[dict[str, Any]], None] | None) -> Iterator[PreparedLine]:
    """change: applied to every body; its values are raw JSON."""
    for number, _, raw in raw_lines(path, MAX_LINE_BYTES):
        line = _line(number, raw)
        body = bytes(line.body)
        if change is not None:
            fields: dict[str, Any] = _object.decode(body)
            change(fields)
            body = msgspec.json.encode(fields)
        yield PreparedLine(number, line.custom_id, line.url, body)


def _line(number: int, raw: bytes) -> Line:
    """A line in the format of /v1/batches, or the body alone: {"messages": …} or {"prompt": …}."""
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine("", f"longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = _object.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadLine("", f"not a JSON object: {error}") from None
    url = next((url for name, url in _PLAIN_URLS.items() if name in fields), None)
    if "url" in fields or url is None:
        return read_line(raw)
    return Line(f"line-{number}", "POST", url, msgspec.Raw(raw))


class OutputFile:
    """Answers, one per line. Keeps what it held when opened, except a partial last line."""

    def __init__(self, path: Path) -> None:
        self.answered: set[str] = set()
        self._file: BinaryIO = path.open("ab+")
        self._take_up()
        self._waiting: list[bytes] = []
        self._writing = asyncio.Lock()

    def _take_up(self) -> None:
        self._file.seek(0)
        whole = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break  # the last line is incomplete
            if raw.strip():
                try:
                    self.answered.add(_named.decode(raw).custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BadInput(
                        f"the output file exists and is not the output of a batch: {error}; name another file"
                    ) from None
            whole += len(raw)
        self._file.truncate(whole)

    async def append(self, line: bytes) -> None:
        """Returns when the line is on disk; concurrent lines are written together."""
        self._waiting.append(line)
        async with self._writing:
            lines, self._waiting = self._waiting, []
            if lines:
                await asyncio.to_thread(self._write, lines)

    def _write(self, lines: list[bytes]) -> None:
        self._file.write(b"".join(line + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True)
class OfflineBatch:
    sender: LineSender
    output: OutputFile
    in_flight: int
    report: Callable[[Figures], None] = lambda figures: None
    figures: Figures = field(default_factory=Figures)

    async def run(self, lines: Iterator[PreparedLine]) -> Figures:
        slots = asyncio.Semaphore(self.in_flight)
        try:
            async with asyncio.TaskGroup() as asking:
                for line in lines:
                    if line.custom_id not in self.output.answered:
                        await slots.acquire()
                        asking.create_task(self._ask(line)).add_done_callback(lambda _: slots.release())
        except ExceptionGroup as group:  # they all failed for the same reason
            raise group.exceptions[0] from None
        return self.figures

    async def _ask(self, line: PreparedLine) -> None:
        name = f"batch_req_{line.number}"
        reply = await self.sender.reply(name, line.url, line.body)
        await self.output.append(answer_line(name, line.custom_id, reply))
        self._count(reply)

    def _count(self, reply: Reply) -> None:
        figures = self.figures
        if reply.status >= 400:
            figures.failed += 1
        else:
            figures.answered += 1
            usage = _used.decode(reply.body).usage or _Usage()
            details = usage.prompt_tokens_details or usage.input_tokens_details
            figures.prompt_tokens += usage.prompt_tokens or usage.input_tokens
            figures.output_tokens += usage.completion_tokens or usage.output_tokens
            figures.cached_tokens += (details.cached_tokens or 0) if details else 0
        self.report(figures)
