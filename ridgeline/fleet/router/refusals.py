"""Refusal: an error answer of the router itself, with a status and a code; and the refusal of each error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.proxy.errors import (
    InvalidBody,
    InvalidHead,
    NoReplica,
    ProxyError,
    QueueRefused,
    RequestBroken,
)

INVALID = "invalid_request_error"


class Refusal(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.type, self.param = status, message, code, type, param
        self.headers = headers or {}


def of_error(error: ProxyError) -> Refusal:
    if isinstance(error, InvalidBody):
        return Refusal(400, str(error), error.code, param=error.param)
    if isinstance(error, InvalidHead):
        return Refusal(400, str(error), error.code)
    if isinstance(error, QueueRefused):
        wait = {"retry-after": str(max(math.ceil(error.retry_after_s), 1))}
        return Refusal(429, str(error), error.code, type="rate_limit_error", headers=wait)
    if isinstance(error, NoReplica):
        wait = {"retry-after": str(max(math.ceil(error.retry_after_s), 1))}
        return Refusal(503, str(error), error.code, type="service_unavailable_error", headers=wait)
    if isinstance(error, RequestBroken) and error.cause == "quarantined":
        # Not 5xx: clients send those again by themselves.
        return Refusal(422, str(error), "request_quarantined", type="server_error")
    if isinstance(error, RequestBroken):
        status = 504 if error.is_timeout else 502
        code = "replica_timeout" if error.is_timeout else "replica_failed"
        return Refusal(status, str(error), code, type="server_error")
    return Refusal(502, str(error), "replica_failed", type="server_error")


def unknown_path(path: str, objects: Sequence[str]) -> Refusal:
    if path.startswith(tuple(objects)):
        message = (
            "a fleet does not serve files, batches or stored responses: they would be on one replica; send "
            "the request to a single server"
        )
        return Refusal(404, message, "not_in_a_fleet")
    message = (
        "no such path; use /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
        "/v1/embeddings, /v1/rerank, /v1/score, /v1/models or /api/chat"
    )
    return Refusal(404, message, "not_found")
