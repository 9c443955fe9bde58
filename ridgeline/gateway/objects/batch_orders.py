"""A batch's order: its estimate is reserved and stored before the batch is created at its upstream.

The order is stored before anything is sent, and becomes the batch once the upstream has given an id. So a
gateway that dies in between loses no batch: `BatchBooking` finds it by the order's input file.
"""

from __future__ import annotations

import msgspec

from ridgeline.gateway.body import raw, read_fields, write_fields
from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.limits.limiter_types import Reservation, limited_only
from ridgeline.gateway.limits.subjects import subjects_of
from ridgeline.gateway.objects.batch_meta import meta_of
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState
from ridgeline.gateway.tenants.keys import Key
from ridgeline.gateway.tenants.owned import Owned

ORDER = "batch_order"  # the kind of an order in the store


async def order_batch(parts: Parts, request: RequestState, file: Owned) -> Owned:
    """Raises Limited if the file's estimate exceeds what key, team or model have left."""
    key, meta = request.key, meta_of(file)
    assert key is not None
    if not meta.lines:
        message = "input_file_id: the file was uploaded before batches were estimated; upload it again"
        raise BadRequest(message, param="input_file_id")
    subjects = subjects_of(key, request.team, parts.catalog.find(meta.model))
    tokens = meta.tokens_in + meta.tokens_out
    reservation = await parts.limiter.reserve_background(
        request.id, subjects, tokens, meta.cost_pusd, key.when_limits_unknown
    )
    ordered = msgspec.structs.replace(
        meta,
        key=key.id,
        team=key.team,
        order=request.id,
        input_file_id=file.id,
        reserved_tokens=reservation.tokens,
        at_ms=reservation.at_ms or request.row.at_ms,
    ).stored()
    try:
        await parts.owned.remember(request.id, request.tenant, file.upstream, ORDER, ordered)
    except BaseException:
        parts.limiter.settle(reservation, 0, 0)
        raise
    return Owned(request.id, request.tenant, file.upstream, ORDER, request.row.at_ms, ordered)


async def drop_order(parts: Parts, order: Owned) -> None:
    """The order's batch was never created."""
    await parts.owned.forget(order.id)
    parts.limiter.settle(reservation_of(parts, order), 0, 0)


def with_reason(body: bytes, batch: Owned) -> bytes:
    """The upstream's batch, with the reason in its `errors` if the gateway stopped it."""
    stopped = meta_of(batch).stopped
    if stopped is None:
        return body
    fields = read_fields(body)
    error = {"code": stopped.code, "message": stopped.message, "param": None, "line": None}
    return write_fields({**fields, "errors": raw({"object": "list", "data": [error]})})


def reservation_of(parts: Parts, owned: Owned) -> Reservation:
    """The claim of an order or a batch under the current limits; `meta` has the reserved amount."""
    meta, table = meta_of(owned), parts.keys.table
    # A deleted key has no limits. Its team and model still reserve the batch's cost.
    key = table.known_key(meta.key) or Key(meta.key, "")
    try:
        model = parts.catalog.find(meta.model)
    except NotFound:  # the configuration has changed
        model = None
    team = table.team(meta.team) if meta.team else None
    return Reservation(
        meta.order or owned.id,
        limited_only(subjects_of(key, team, model)),
        meta.reserved_tokens,
        meta.cost_pusd,
        meta.at_ms or owned.created_ms,
        is_background=True,
    )
