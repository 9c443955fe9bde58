"""Errors in the client's dialect: as a body, or as the last event of a stream that failed.

Called by the pipeline with a GatewayError's fields, and with errors of upstreams.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.dialects.families import family_of
from ridgeline.proxy.error_bodies import error_body, error_event

__all__ = ["Told", "error_body", "error_event", "told_error", "translated_error", "translated_error_event"]

_OPENAI_TYPES = {
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
    "rate_limit_error": "rate_limit_error",
    "billing_error": "insufficient_quota",
    "overloaded_error": "service_unavailable_error",
    "timeout_error": "server_error",
    "api_error": "server_error",
}
_STATUS = {  # of an error in a stream, which has no status
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "insufficient_quota": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "service_unavailable_error": 503,
    "overloaded_error": 503,
    "timeout_error": 504,
}
MAX_MESSAGE = 2000
OVERFLOW_CODE = "context_length_exceeded"  # of OpenAI's errors
OVERFLOW_WORDS = "prompt is too long"  # the beginning of Anthropic's message


class Told(msgspec.Struct):
    """An upstream's error, from either family: one has `code` and `param`, the other only a type."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None
    param: str | None = None

    @property
    def status(self) -> int:
        return _STATUS.get(self.type or "", 500)


class _Body(msgspec.Struct):
    error: Told | str | None = None
    message: str | None = None
    detail: Any = None
    request_id: str | None = None


_bodies = msgspec.json.Decoder(_Body)


def told_error(body: bytes) -> Told:
    """An upstream's error, in any shape."""
    try:
        read = _bodies.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Told("the upstream answered with an error")
    match read.error:
        case Told() as told:
            told.message = told.message[:MAX_MESSAGE]
            return told
        case str(message):
            return Told(message[:MAX_MESSAGE])
    said = read.message or (read.detail if isinstance(read.detail, str) else None)
    return Told((said or "the upstream answered with an error")[:MAX_MESSAGE])


def translated_error(kind: str, status: int, body: bytes, request_id: str = "") -> bytes:
    """An upstream's error body in the dialect of a client of this kind."""
    told = told_error(body)
    family = family_of(kind)
    _tell_overflow(told, family)
    return error_body(
        family, status, openai_type(told, status), told.message, told.param, _code(told), request_id
    )


def translated_error_event(kind: str, told: Told, request_id: str = "", sequence_number: int = 0) -> bytes:
    type = openai_type(told, told.status)
    _tell_overflow(told, family_of(kind))
    return error_event(
        kind, told.status, type, told.message, told.param, _code(told), request_id, sequence_number
    )


def _tell_overflow(told: Told, family: str) -> None:
    """A prompt that exceeds the context, in the words that clients of the family search for."""
    if told.code != OVERFLOW_CODE and not told.message.startswith(OVERFLOW_WORDS):
        return
    if family == "anthropic" and not told.message.startswith(OVERFLOW_WORDS):
        told.message = f"{OVERFLOW_WORDS}: {told.message}"
    elif family == "openai":
        told.code = OVERFLOW_CODE


def openai_type(told: Told, status: int) -> str:
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return _OPENAI_TYPES.get(told.type or "", fallback)


def _code(told: Told) -> str | None:
    return None if told.code is None else str(told.code)
