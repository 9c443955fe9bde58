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
        late = error.is_timeout
        code = "upstream_timeout" if late else "upstream_failed"
        super().__init__(str(error), status=504 if late else 502, code=code)
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
