"""What can go wrong between a proxy and its upstreams. Callers map these errors to their own.

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
]

_MESSAGES: dict[Cause, str] = {
    "refused": "no connection to the upstream: refused",
    "unresolved": "no connection to the upstream: its name is not known",
    "tls": "no connection to the upstream: its certificate or its TLS was not accepted",
    "unreachable": "no connection to the upstream",
    "connect_timeout": "no connection to the upstream in time",
    "busy": "too many connections to upstreams are open",
    "reset": "the upstream closed the connection before it had answered",
    "stale": "the upstream closed a kept-alive connection as the request was sent; the request may have been "
    "executed and was not sent again",
    "truncated": "the upstream closed the connection in the middle of its answer",
    "garbage": "the upstream's answer was not valid HTTP",
    "head_too_large": "the head of the upstream's answer was too large",
    "body_too_large": "the upstream's answer was too large",
    "upload_lost": "a file of the request's body could not be read",
    "first_byte_timeout": "the upstream did not begin to answer in time",
    "idle_timeout": "the upstream stopped in the middle of its answer",
    "total_timeout": "the request's time was over before the upstream had answered",
    "aborted": "the request to the upstream was given up",
}


class ProxyError(Exception):
    """One request failed; the client, its pool and its queue go on."""


class RequestBroken(ProxyError):
    """No answer, or one that broke off."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(_MESSAGES[cause])
        self.cause: Cause = cause

    @property
    def is_timeout(self) -> bool:
        return self.cause.endswith("_timeout")


class InvalidHead(ProxyError):
    """A header or path that cannot be sent: it could begin a line of its own, or leave the base URL."""

    def __init__(self, message: str, code: Literal["invalid_header", "invalid_path"]) -> None:
        super().__init__(message)
        self.code = code


class QueueRefused(ProxyError):
    """No place in a queue: it is full, or the wait took too long."""

    def __init__(self, code: Literal["queue_full", "queue_timeout"], retry_after_s: float) -> None:
        reason = "too many requests wait already" if code == "queue_full" else "its turn did not come in time"
        super().__init__(f"the model is busy and {reason}")
        self.code, self.retry_after_s = code, retry_after_s


class Unreachable(ProxyError):
    """A blocking request got no answer. The message is the reason; `__cause__` is the original error."""


class BrokenOff(ProxyError):
    """The answer to a blocking request did not arrive whole."""
