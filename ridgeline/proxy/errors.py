"""Errors between a proxy and its upstreams. Callers map them to their own.

No message holds a key, an upstream's address or text of a request.
"""

from __future__ import annotations

from typing import Literal

Cause = Literal[
    "refused",
    "unresolved",
    "tls",
    "unreachable",
    "connect_timeout",
    "busy",
    "reset",
    "stale",
    "truncated",
    "garbage",
    "head_too_large",
    "body_too_large",
    "upload_lost",
    "first_byte_timeout",
    "idle_timeout",
    "total_timeout",
    "aborted",
    "no_progress",
    "unresumable",
    "quarantined",
]

_MESSAGES: dict[Cause, str] = {
    "refused": "cannot connect to the upstream: connection refused",
    "unresolved": "cannot connect to the upstream: unknown host name",
    "tls": "cannot connect to the upstream: TLS handshake or certificate check failed",
    "unreachable": "cannot connect to the upstream",
    "connect_timeout": "timed out while connecting to the upstream",
    "busy": "too many connections to upstreams are open",
    "reset": "the upstream closed the connection before it answered",
    "stale": "the upstream closed a kept-alive connection as the request was sent; the request may have been "
    "executed and was not sent again",
    "truncated": "the upstream closed the connection in the middle of its answer",
    "garbage": "the upstream's answer was not valid HTTP",
    "head_too_large": "the head of the upstream's answer was too large",
    "body_too_large": "the upstream's answer was too large",
    "upload_lost": "could not read a file of the request's body",
    "first_byte_timeout": "the upstream did not begin to answer in time",
    "idle_timeout": "the upstream stalled in the middle of its answer",
    "total_timeout": "the upstream did not answer within the request's time limit",
    "aborted": "the request to the upstream was given up",
    "no_progress": "the replica made no progress and was taken out of service",
    "quarantined": "several replicas in a row died while they computed this request, so it was not sent to "
    "another one; do not send it again unchanged",
    "unresumable": "the replica was lost in the middle of its answer, and no other could continue it",
}


class ProxyError(Exception):
    """One request failed; the client, its pool and its queue stay usable."""


class RequestBroken(ProxyError):
    """No answer, or an incomplete one."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(_MESSAGES[cause])
        self.cause: Cause = cause

    @property
    def is_timeout(self) -> bool:
        return self.cause.endswith("_timeout")


class InvalidHead(ProxyError):
    """A header or path that cannot be sent: it could start another header line, or leave the base URL."""

    def __init__(self, message: str, code: Literal["invalid_header", "invalid_path"]) -> None:
        super().__init__(message)
        self.code = code


class InvalidBody(ProxyError):
    """A request's body that is not JSON, or a field of a wrong type. `param`: the field that must change."""

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class QueueRefused(ProxyError):
    """No slot: the queue is full, or the wait took too long."""

    def __init__(self, code: Literal["queue_full", "queue_timeout"], retry_after_s: float) -> None:
        reason = "its queue is full" if code == "queue_full" else "the request waited too long in its queue"
        super().__init__(f"the model is busy and {reason}")
        self.code, self.retry_after_s = code, retry_after_s


class NoReplica(ProxyError):
    """No replica of the model became ready in time, or none is left that may answer the request."""

    code = "no_replica"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(ProxyError):
    """A blocking request got no answer. The message is the reason; `__cause__` is the original error."""


class BrokenOff(ProxyError):
    """The answer to a blocking request is incomplete."""
