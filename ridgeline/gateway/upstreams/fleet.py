"""A fleet as an upstream: its router runs in this worker and gets each request's tenant and priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.fleet.router.request import FleetRequest
from ridgeline.gateway.upstreams.call import Call
from ridgeline.gateway.upstreams.outgoing import Outgoing
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.json_fields import Fields, read_fields
from ridgeline.proxy.request_head import Headers

if TYPE_CHECKING:
    from ridgeline.fleet.router.fleet_router import FleetRouter


async def ask_fleet(
    fleet: FleetRouter, model: str, outgoing: Outgoing, headers: Headers, call: Call
) -> UpstreamAnswer:
    """The answer of a replica. Raises what `FleetRouter.ask` raises."""
    if outgoing.method == "GET":
        return fleet.listing(outgoing.path)
    fields: Fields | None = outgoing.fields
    if fields is None:
        fields = read_fields(outgoing.body) if isinstance(outgoing.body, bytes) else {}
    request_id = next((value for name, value in headers if name == b"x-request-id"), b"")
    return await fleet.ask(
        FleetRequest(
            outgoing.method,
            outgoing.path,
            headers,
            outgoing.body,
            model,
            fields,
            stream=outgoing.stream,
            tenant=call.tenant,
            weight=call.weight,
            priority=call.priority,
            until=call.deadline,
            repeatable=call.repeatable,
            request_id=request_id.decode("latin-1"),
            residency=call.residency,
        )
    )
