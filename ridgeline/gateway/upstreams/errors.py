"""Turns the proxy's errors into the gateway's: the client's error when an upstream failed."""

from __future__ import annotations

import math

from ridgeline.gateway.errors import BadRequest, GatewayError, Limited, Unavailable, UpstreamFailed
from ridgeline.proxy.errors import (
    Cause,
    InvalidBody,
    InvalidHead,
    NoReplica,
    ProxyError,
    QueueRefused,
    RequestBroken,
)


class UpstreamBroken(UpstreamFailed):
    """No answer, or an incomplete one. `cause` is a word for rows and metrics."""

    def __init__(self, error: RequestBroken) -> None:
        status, code = (504, "upstream_timeout") if error.is_timeout else (502, "upstream_failed")
        if error.cause == "quarantined":  # not 5xx: clients send those again by themselves
            status, code = 422, "request_quarantined"
        super().__init__(str(error), status=status, code=code)
        self.cause: Cause = error.cause


def gateway_error(error: ProxyError) -> GatewayError:
    if isinstance(error, RequestBroken):
        return UpstreamBroken(error)
    if isinstance(error, InvalidHead):
        return BadRequest(str(error), code=error.code)
    if isinstance(error, QueueRefused):
        return Limited(str(error), error.retry_after_s, code=error.code)
    if isinstance(error, InvalidBody):
        return BadRequest(str(error), code=error.code, param=error.param)
    if isinstance(error, NoReplica):
        headers = {"retry-after": str(max(math.ceil(error.retry_after_s), 1))}
        return Unavailable(str(error), code=error.code, headers=headers)
    return UpstreamFailed(str(error))
