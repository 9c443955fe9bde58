"""The client's error when the proxy under the gateway fails."""

from __future__ import annotations

import typing

import pytest

from ridgeline.gateway.errors import BadRequest, Limited, UpstreamFailed
from ridgeline.gateway.upstreams.errors import UpstreamBroken, gateway_error
from ridgeline.proxy.errors import Cause, InvalidHead, QueueRefused, RequestBroken


@pytest.mark.parametrize("cause", typing.get_args(Cause))
def test_every_cause_has_a_status_a_code_and_a_message(cause: Cause) -> None:
    error = gateway_error(RequestBroken(cause))
    assert isinstance(error, UpstreamBroken)
    assert isinstance(error, UpstreamFailed)  # what the pipeline looks for
    told = (504, "upstream_timeout") if "timeout" in cause else (502, "upstream_failed")
    if cause == "quarantined":
        told = (422, "request_quarantined")
    assert (error.status, error.code) == told
    assert error.cause == cause
    assert len(error.message) > len(cause)


def test_a_full_queue_says_when_to_come_back() -> None:
    error = gateway_error(QueueRefused("queue_full", 7.2))
    assert isinstance(error, Limited)
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "queue_full", "8")


def test_a_header_that_cannot_be_sent_is_the_requests_fault() -> None:
    error = gateway_error(InvalidHead("a header's name is not a token", "invalid_header"))
    assert isinstance(error, BadRequest)
    assert (error.status, error.code) == (400, "invalid_header")
