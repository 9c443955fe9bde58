"""The lines of a batch's input file: read once from end to end, checked, and their offsets noted.

Called off the event loop when a batch is validated; `ridgeline batch` reads its input by the same rules.
Holds at most one line at a time. The endpoint checks a line's `body` later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.server.batches.bodies import BatchEndpoint, Line, LineError
from ridgeline.server.batches.store import PendingLine

MAX_LINES = 50_000
MAX_ERRORS = 100  # reported at most; fix these first


class _Body(msgspec.Struct, frozen=True):
    """The fields of a body that concern the batch: an answer must be whole and waited for."""

    stream: bool | None = None
    background: bool | None = None


_line = msgspec.json.Decoder(Line)
_body = msgspec.json.Decoder(_Body)


class BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(raw: bytes, endpoint: BatchEndpoint | None = None) -> Line:
    """A line of the input. endpoint: the required `url`; None: any, for `ridgeline batch`."""
    try:
        line = _line.decode(raw)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise BadLine("invalid_request", what, path.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"this line is not valid JSON: {error}") from None
    except RecursionError:
        raise BadLine("invalid_json_line", "this line is nested too deeply") from None
    if endpoint is not None and line.url != endpoint:
        message = (
            f"the url is {line.url[:100]!r}; the batch's endpoint is {endpoint!r}, and every line must use it"
        )
        raise BadLine("mismatched_url", message, "url")
    try:
        body = _body.decode(line.body)
    except msgspec.DecodeError as error:
        raise BadLine("invalid_request", f"the body is invalid: {error}", "body") from None
    if body.stream:
        raise BadLine("invalid_request", "a batch has whole answers; remove stream", "body.stream")
    if body.background:
        message = "a batch already runs in the background; remove background"
        raise BadLine("invalid_request", message, "body.background")
    return line


def check_input(
    path: Path, endpoint: BatchEndpoint, max_line_bytes: int
) -> tuple[list[PendingLine], list[LineError]]:
    """Every line's offset, and the errors. Blank lines are skipped."""
    lines: list[PendingLine] = []
    errors: list[LineError] = []
    seen: dict[str, int] = {}
    for number, offset, raw in raw_lines(path, max_line_bytes):
        try:
            if len(raw) > max_line_bytes:
                raise BadLine("line_too_long", f"this line is longer than {max_line_bytes} bytes")
            line = read_line(raw, endpoint)
            if line.custom_id in seen:
                message = (
                    f"the custom_id {line.custom_id[:100]!r} is also that of line {seen[line.custom_id]}"
                )
                raise BadLine("duplicate_custom_id", message, "custom_id")
        except BadLine as error:
            errors.append(LineError(error.code, error.message, error.param, number))
            if len(errors) == MAX_ERRORS:
                break
            continue
        seen[line.custom_id] = number
        lines.append(PendingLine(number, offset, len(raw), line.custom_id))
        if len(lines) > MAX_LINES:
            return [], [LineError("too_many_lines", f"a batch has at most {MAX_LINES} lines")]
    if not lines and not errors:
        errors.append(LineError("empty_file", "the input file has no lines"))
    return lines, errors


def raw_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes) of every non-blank line; a prefix of a line that is too long."""
    with path.open("rb") as file:
        number = offset = 0
        while raw := file.readline(max_line_bytes + 2):
            number += 1
            start, offset = offset, offset + len(raw)
            longer = len(raw) > max_line_bytes + 1
            while longer and not raw.endswith(b"\n") and (rest := file.readline(1 << 20)):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            stripped = raw.rstrip(b"\r\n")
            if stripped.strip():
                yield number, start, stripped
