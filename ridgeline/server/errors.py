"""Errors of HTTP requests, and the one table that maps every exception to its response.

Responses have OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Validation and handlers raise
them; the gate turns them into responses, or a stream that has begun into its last event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException

from ridgeline.engine.errors import (
    EngineDied,
    GrammarTooComplex,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    SchemaViolation,
)
from ridgeline.models.errors import TemplateError
from ridgeline.replica.resume import ENGINE_DIED_HEADER

INVALID = "invalid_request_error"
SERVER = "server_error"
UNAVAILABLE = "service_unavailable_error"
ANSWER = "answer_error"  # the model's answer cannot be returned

ErrorCode = Literal[
    "invalid_http",
    "head_too_large",
    "host_not_allowed",
    "origin_not_allowed",
    "too_many_requests",
    "too_many_connections",
    "invalid_json",
    "too_many_values",
    "invalid_type",
    "missing_field",
    "unknown_field",
    "unsupported_field",
    "context_length_exceeded",
    "template_error",
    "invalid_api_key",
    "model_not_found",
    "model_not_suitable",
    "not_found",
    "method_not_allowed",
    "body_too_large",
    "unsupported_media_type",
    "queue_full",
    "request_failed",
    "schema_violation",
    "grammar_too_complex",
    "internal_error",
    "not_ready",
    "draining",
    "engine_died",
    "timeout",
    "not_resumable",
    "in_progress",
]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None  # the JSON path of the field that must change
    code: ErrorCode | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error as OpenAI's clients expect it."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An exception as the client sees it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: ErrorCode | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON body. Long names and values of the client's are truncated in it."""
        param = None if self.param is None else _clipped(self.param, 200)
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.shown_message(), self.type, param, self.code)))

    def shown_message(self) -> str:
        return _clipped(self.message, 2000)


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


class ApiError(Exception):
    """An error found by the HTTP layer; it carries its own response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: ErrorCode | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reply = ErrorReply(status, message, type, param, code, headers or {})


class BadRequest(ApiError):
    """400: `param` is the JSON path of the part the client must change; None for the body as a whole."""

    def __init__(self, param: str | None, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(400, f"{param}: {message}" if param else message, param=param, code=code)


class ContextTooLong(BadRequest):
    """400: the prompt does not fit the context. Clients recognize this by the code or by these words."""

    def __init__(self, param: str, prompt_tokens: int, max_context: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context
        message = (
            f"This model's maximum context length is {max_context} tokens. However, your prompt resulted in "
            f"{prompt_tokens} tokens. Reduce the length of the prompt."
        )
        super().__init__(param, message, "context_length_exceeded")


class NotReady(ApiError):
    """503: no request can be accepted now; the client should retry."""

    def __init__(self, reason: str, code: ErrorCode = "not_ready", retry_after_s: int = 2) -> None:
        headers = {"retry-after": str(retry_after_s)}
        super().__init__(503, reason, type=UNAVAILABLE, code=code, headers=headers)


class DeadlineExceeded(ApiError):
    """504: the answer was not complete within the server's limit; the output so far is partial."""

    def __init__(self, limit_s: float) -> None:
        message = (
            f"the answer was not complete after {limit_s:g} s, this server's limit; ask for fewer tokens"
        )
        super().__init__(504, message, type=SERVER, code="timeout")


class ClientGone(Exception):
    """The client closed the connection; no response can be sent."""


class SlowReader(Exception):
    """The client did not read its stream for too long: the connection is closed without a final event."""


def _http(error: HTTPException) -> ErrorReply:
    codes: dict[int, ErrorCode] = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code)
    return ErrorReply(error.status_code, error.detail, code=code, headers=dict(error.headers or {}))


def _queue_full(error: QueueFull) -> ErrorReply:
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return ErrorReply(429, str(error), "rate_limit_error", code="queue_full", headers=headers)


_TABLE: dict[type[BaseException], Callable[[Any], ErrorReply]] = {
    ApiError: lambda e: e.reply,
    HTTPException: _http,
    InvalidRequest: lambda e: ErrorReply(400, str(e), param=e.field),
    TemplateError: lambda e: ErrorReply(400, str(e), param="messages", code="template_error"),
    # Our code has no unbounded recursion: the value passed decoding but was too deep for a later step.
    RecursionError: lambda e: ErrorReply(400, "a value is nested too deeply", code="invalid_json"),
    QueueFull: _queue_full,
    EngineDied: lambda e: ErrorReply(
        503,
        str(e) or "the engine died",
        UNAVAILABLE,
        code="engine_died",
        headers={"retry-after": "2", ENGINE_DIED_HEADER: "1"},
    ),
    SchemaViolation: lambda e: ErrorReply(422, str(e), ANSWER, code="schema_violation"),
    GrammarTooComplex: lambda e: ErrorReply(422, str(e), ANSWER, code="grammar_too_complex"),
    RequestFailed: lambda e: ErrorReply(500, str(e) or "the request failed", SERVER, code="request_failed"),
}


def reply_to(error: BaseException) -> ErrorReply | None:
    """The table's response, by the most specific class; None for unexpected exceptions."""
    for kind in type(error).__mro__:
        if kind in _TABLE:
            return _TABLE[kind](error)
    return None


def unexpected(request_id: str) -> ErrorReply:
    """The response to a bug: reveals nothing internal, but names the request id in the log."""
    return ErrorReply(
        500, f"internal error; the log has it under request id {request_id}", SERVER, code="internal_error"
    )
