"""Stored responses of /v1/responses: recorded with their owner; only the owner can continue them.

The upstream that made a response stores it, so a request that continues it must go there too.
"""

from __future__ import annotations

import re

import msgspec

from ridgeline.gateway.body import field
from ridgeline.gateway.dialects.streams.events import end_of_last
from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState

MAX_ID = 128
MAX_HELD = 64 << 10  # bytes at a stream's beginning that are searched for the id
NULL = msgspec.Raw(b"null")
_ID = re.compile(rb'"id"\s*:\s*"(resp[-_A-Za-z0-9]{1,120})"')


async def continue_response(parts: Parts, request: RequestState, job: Job) -> None:
    """For a request that continues a response: check the owner, and use the response's upstream."""
    if field(request.fields, "background", bool, False):
        raise BadRequest(
            "background: not available through the gateway, which could not book it", param="background"
        )
    if request.fields.get("conversation", NULL) != NULL:
        # Its owner is unknown here: to the upstream all tenants are one client.
        message = (
            "conversation: not available through the gateway; continue a response with previous_response_id"
        )
        raise BadRequest(message, param="conversation")
    before = field(request.fields, "previous_response_id", str, "")
    if not before:
        return
    owned = await parts.owned.owner(before) if len(before) <= MAX_ID else None
    if owned is None or owned.tenant != request.tenant or owned.kind != "response":
        raise NotFound(f"no response is named {before[:MAX_ID]!r}", param="previous_response_id")
    assert job.model is not None
    job.targets = [target for target in job.model.targets if target.upstream == owned.upstream]
    if not job.targets:
        raise NotFound(
            f"the upstream of the response {before!r} does not serve the model {job.model.name!r}",
            param="previous_response_id",
        )


async def remember_response(parts: Parts, request: RequestState, data: bytes) -> None:
    """Record the owner before the client reads the id. `data`: the answer, or the beginning of its stream."""
    found = _ID.search(data) if is_stored(request) else None
    if found is not None:
        await parts.owned.remember(found[1].decode(), request.tenant, request.row.upstream, "response", {})


def is_stored(request: RequestState) -> bool:
    return field(request.fields, "store", bool, True)


class FirstEvent:
    """Splits the beginning of a stream: bytes to send at once, and bytes that wait until the id is known.

    Comments pass at once. Bytes from the first `data:` line on are held until they hold a response's id, or
    until MAX_HELD bytes have arrived: the bytes may be cut anywhere.
    """

    def __init__(self) -> None:
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes to send at once."""
        self.held += data
        if self._has_event():
            return b""
        end = end_of_last(self.held)
        passed, self.held = (self.held[:end], self.held[end:]) if end > 0 else (b"", self.held)
        return passed

    @property
    def is_done(self) -> bool:
        return _ID.search(self.held) is not None or len(self.held) > MAX_HELD

    def _has_event(self) -> bool:
        return self.held.startswith((b"data:", b"event:")) or b"\ndata:" in self.held
