"""Structured logs: one line per event, JSON for programs or text for terminals, standard library only.

`setup` is called once per process; everything else logs through `logging` with extra fields. In JSON format
every line is an event: other libraries' records, warnings, uncaught exceptions, and the output of `say` and
`fail`. Prompts and answers are never logged: `log_request` takes numbers only.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

from ridgeline.telemetry.timing import TimingRecord

Format = Literal["auto", "text", "json"]
LEVELS = ("debug", "info", "warning", "error")

requests = logging.getLogger("ridgeline.request")
_log = logging.getLogger("ridgeline")

# The standard attributes of a LogRecord; all others came in through `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HANDLER_NAME = "ridgeline"


def setup(level: str = "info", format: Format = "auto", stream: TextIO | None = None) -> None:
    """Send this process's logs to `stream` (stderr). Auto: text on a terminal, JSON elsewhere.

    `level` is for ridgeline's own loggers; other libraries log from `warning` on.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}; use one of {', '.join(LEVELS)}")
    if format == "auto":
        format = "text" if (stream or sys.stderr).isatty() else "json"
    handler: logging.StreamHandler[TextIO] = _Stderr() if stream is None else logging.StreamHandler(stream)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    _log.setLevel(level.upper())
    if stream is None:
        _log_what_python_prints()


def say(text: str, message: str, **fields: Any) -> None:
    """Print `text` on stdout. In JSON format: log one event with `message` and `fields`."""
    if _is_json():
        _log.info(message, extra=fields)
    else:
        print(text, flush=True)


def fail(text: str) -> None:
    """Print on stderr why the process ends. In JSON format: log one event."""
    if _is_json():
        _log.error(text)
    else:
        print(text, file=sys.stderr, flush=True)


def for_people() -> TextIO:
    """A stream for human-readable lines: stderr. In JSON format each line becomes an event."""
    return _LineEvents() if _is_json() else sys.stderr


def _is_json() -> bool:
    handlers = [handler for handler in logging.getLogger().handlers if handler.get_name() == _HANDLER_NAME]
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


class _LineEvents(io.TextIOBase, TextIO):
    """Text written here is logged line by line."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            _log.info("%s", line)
        return len(text)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr: it may be replaced after `setup`."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _log_what_python_prints() -> None:
    """Log warnings and uncaught exceptions. A hook set by another library is not replaced."""
    logging.captureWarnings(True)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, (KeyboardInterrupt, SystemExit)):
        _log.critical("uncaught exception", exc_info=(kind, error or kind(), trace))


def log_request(
    request_id: str,
    endpoint: str,
    status: int,
    timing: TimingRecord | None = None,
    finish_reason: str = "",
    error: str = "",
) -> None:
    """The one line of a finished or rejected request. `error` is our own message, never the client's text."""
    fields: dict[str, Any] = {"request_id": request_id, "endpoint": endpoint, "status": status}
    if finish_reason:
        fields["finish_reason"] = finish_reason
    if error:
        fields["error"] = error
    if timing is not None:
        fields.update(timing_fields(timing))
    level = logging.ERROR if status >= 500 else logging.INFO
    requests.log(level, "request", extra=fields)


def timing_fields(timing: TimingRecord) -> dict[str, Any]:
    """A request's logged values: milliseconds and tokens. Unknown ones are left out."""
    seconds = {
        "queue_ms": timing.queue_s,
        "ttft_ms": timing.ttft_s,
        "tpot_ms": timing.tpot_s,
        "inference_ms": timing.inference_s,
        "e2e_ms": timing.e2e_s,
    }
    fields: dict[str, Any] = {name: round(1e3 * s, 2) for name, s in seconds.items() if s is not None}
    fields["prompt_tokens"] = timing.prompt_tokens
    fields["cached_tokens"] = timing.cached_tokens
    fields["output_tokens"] = timing.output_tokens
    fields["preemptions"] = timing.preemptions
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, message, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event.update(_extra_fields(record))
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        # ASCII: characters that end a line elsewhere (U+2028) are escaped.
        return json.dumps(event, default=str)


class TextFormatter(logging.Formatter):
    """12:34:56.789 INFO request  request_id=… ttft_ms=…"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"
        fields = " ".join(f"{name}={_readable(value)}" for name, value in _extra_fields(record).items())
        if fields:
            line = f"{line}  {fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _readable(value: Any) -> str:
    """A value with spaces is quoted; line ends and terminal codes are escaped, so that an event stays on one
    line, can be split, and is safe to print.
    """
    text = str(value)
    if not text.isprintable():
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
