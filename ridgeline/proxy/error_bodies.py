"""Errors in the client's dialect: as a body, or as the last event of a stream that failed.

Used by the gateway and the fleet's router. A kind is that of the endpoint the client called; a family is the
kind's API: openai, anthropic or ollama.
"""

from __future__ import annotations

import msgspec

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


def family_of(kind: str) -> str:
    if kind.startswith("ollama"):
        return "ollama"
    return "anthropic" if kind in ("messages", "count_tokens") else "openai"


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
    if family == "ollama":
        return msgspec.json.encode({"error": message})
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
    if family == "ollama":
        return body + b"\n"
    name = b"event: error\n" if family == "anthropic" else b""
    return name + b"data: " + body + b"\n\n"
