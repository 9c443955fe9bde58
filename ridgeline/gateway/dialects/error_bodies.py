"""Errors in the client's dialect: as a body, or as the last event of a stream that failed.

Called by the pipeline with a GatewayError's fields, and with errors of upstreams.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.dialects.families import family_of

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
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


def error_body(
    family: str,
    status: int,
    type: str,
    message: str,
    param: str | None = None,
    code: str | None = None,
    request_id: str = "",
) -> bytes:
    if family == "anthropic":
        fallback = "api_error" if status >= 500 else "invalid_request_error"
        inner = {"type": _ANTHROPIC_TYPES.get(status, fallback), "message": message}
        return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})
    told = {"message": message, "type": type, "param": param, "code": code}
    return msgspec.json.encode({"error": told})


def error_event(
    kind: str,
    status: int,
    type: str,
    message: str,
    param: str | None = None,
    code: str | None = None,
    request_id: str = "",
    sequence_number: int = 0,
) -> bytes:
    """`kind`: the client's. `sequence_number`: for /v1/responses, the number of events before this one."""
    if kind == "responses":
        event = {
            "type": "error",
            "code": code or type,
            "message": message,
            "param": param,
            "sequence_number": sequence_number,
        }
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    family = family_of(kind)
    body = error_body(family, status, type, message, param, code, request_id)
    name = b"event: error\n" if family == "anthropic" else b""
    return name + b"data: " + body + b"\n\n"


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
