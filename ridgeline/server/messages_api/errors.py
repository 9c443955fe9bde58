"""Errors in the shape that a path's clients expect: Anthropic's, Ollama's or OpenAI's. Called by the gate."""

from __future__ import annotations

import msgspec

from ridgeline.server.errors import ErrorReply
from ridgeline.server.messages_api.bodies import ErrorType, MessagesError, MessagesErrorDetail
from ridgeline.server.ollama_api.bodies import OllamaError

PATH = "/v1/messages"
OLLAMA_PREFIX = "/api/"
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def error_body(reply: ErrorReply, path: str, request_id: str) -> bytes:
    """The error in the shape that this path's clients expect."""
    if is_messages_path(path):
        return msgspec.json.encode(messages_error(reply, request_id))
    if path.startswith(OLLAMA_PREFIX):
        return msgspec.json.encode(OllamaError(reply.shown_message()))
    return reply.body()


def messages_error(reply: ErrorReply, request_id: str) -> MessagesError:
    fallback: ErrorType = "api_error" if reply.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(reply.status, fallback)
    return MessagesError(MessagesErrorDetail(kind, reply.shown_message()), request_id)
