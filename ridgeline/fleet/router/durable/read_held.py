"""read_held(): the request of a journalled one. It was checked when it came."""

from __future__ import annotations

import time

from ridgeline.fleet.queueing.held_ledger import HeldRequest
from ridgeline.fleet.router.endpoints import FORWARDED, is_stream
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.json_fields import field, read_fields


def read_held(held: HeldRequest, timeout_s: float) -> FleetRequest:
    fields = read_fields(held.body)
    endpoint = FORWARDED[held.path.partition("?")[0]]
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in held.headers]
    return FleetRequest(
        "POST",
        held.path,
        headers,
        held.body,
        field(fields, "model", str, ""),
        fields,
        stream=is_stream(endpoint, fields),
        tenant=held.tenant,
        priority=held.priority,
        until=time.monotonic() + timeout_s,
        request_id=dict(headers).get(b"x-request-id", b"").decode("latin-1"),
        is_accepted=True,
    )
