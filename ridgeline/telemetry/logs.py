"""Structured logs: one line per event, JSON for machines or text for people, standard library only.

`setup` is called once per process; everything else logs through `logging` with extra fields. Prompts and
answers are never logged: `log_request` takes figures alone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from ridgeline.telemetry.timing import TimingRecord

Format = Literal["auto", "text", "json"]
LEVELS = ("debug", "info", "warning", "error")

requests = logging.getLogger("ridgeline.request")

# What every LogRecord carries anyway; anything else on it came in through `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HANDLER_NAME = "ridgeline"


def setup(level: str = "info", format: Format = "auto", stream: TextIO | None = None) -> None:
    """Send this process's ridgeline logs to `stream` (stderr). Auto: text on a terminal, JSON elsewhere."""
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    stream = stream or sys.stderr
    if format == "auto":
        format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger = logging.getLogger("ridgeline")
    for old in [old for old in logger.handlers if old.get_name() == _HANDLER_NAME]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # the root logger's format would print every line twice


def log_request(
    request_id: str,
    endpoint: str,
    status: int,
    timing: TimingRecord | None = None,
    finish_reason: str = "",
    error: str = "",
) -> None:
    """The one line of a finished or refused request. `error` is our own message, never the client's text."""
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
    """A request's figures as they are logged: milliseconds and tokens. Unknown ones are left out."""
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
        return json.dumps(event, default=str)  # ASCII: what ends a line elsewhere (U+2028) is escaped here


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
    """A value with spaces is quoted, one with line ends or terminal codes is escaped: a log line stays one
    line, splittable, and harmless to look at.
    """
    text = str(value)
    if not text.isprintable():
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
