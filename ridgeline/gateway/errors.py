"""Errors of a request at the gateway, with the status and code for its client.

Raised by every part; one place (`pipeline/app.py`) turns them into an answer in the client's dialect. A
message never holds a key, an upstream's address or text of the request.
"""

from __future__ import annotations

import math
from typing import Any

INVALID = "invalid_request_error"
REVOKED = "revoked_api_key"
LONG_WAIT_S = 120.0  # makes SDKs raise at once instead of sleeping until a budget's day is over


class GatewayError(Exception):
    """Raised for one request; its client gets `status` and `message`."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the field that must change
        self.headers = headers or {}
        if status is not None:
            self.status = status
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickling between processes: subclasses have different arguments."""
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[GatewayError], args: tuple[Any, ...], fields: dict[str, Any]) -> GatewayError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class BadRequest(GatewayError):
    status, type, code = 400, INVALID, "invalid_request"


class Unauthorized(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(GatewayError):
    """The key is valid, but its scope does not allow the request."""

    status, type, code = 403, "permission_error", "not_allowed"


class NotFound(GatewayError):
    status, type, code = 404, INVALID, "not_found"


class Limited(GatewayError):
    """A limit or a budget is used up, or a queue is full. Always has a retry-after time."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float, **fields: object) -> None:
        super().__init__(message, **fields)  # type: ignore[arg-type]
        self.retry_after_s = retry_after_s
        self.headers = {"retry-after": str(max(math.ceil(retry_after_s), 1)), **self.headers}
        if retry_after_s > LONG_WAIT_S:
            self.headers["x-should-retry"] = "false"


class Unavailable(GatewayError):
    status, type, code = 503, "service_unavailable_error", "unavailable"


class UpstreamFailed(GatewayError):
    """Every upstream for the request failed or is unavailable."""

    status, type, code = 502, "upstream_error", "upstream_failed"


class UpstreamTimeout(UpstreamFailed):
    status, code = 504, "upstream_timeout"


def shutting_down() -> Unavailable:
    return Unavailable(
        "the gateway is shutting down, and the answer did not finish within drain_s; send the request again",
        code="shutting_down",
        headers={"retry-after": "1"},
    )


def out_of_time() -> UpstreamTimeout:
    return UpstreamTimeout("the answer did not finish within the gateway's request_timeout_s")


def key_revoked() -> Unauthorized:
    return Unauthorized("the API key has been revoked", code=REVOKED)


class ClientGone(Exception):
    """The client has closed its connection: no answer is sent."""
