"""Lists of a tenant's own files, batches and vector stores, from the gateway's table of owners: newest first,
by cursor.

A file's description is stored when it is created or first listed, a batch's when it has ended; only objects
that may still change are requested from the upstream: running batches and vector stores, one request each.
"""

from __future__ import annotations

import asyncio

import msgspec

from ridgeline.gateway.errors import BadRequest, UpstreamFailed
from ridgeline.gateway.objects.batch_orders import with_reason
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.tenants.owned import MAX_META, Meta, Owned
from ridgeline.gateway.upstreams.errors import UpstreamBroken
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target

PATHS = {"file": "/v1/files", "batch": "/v1/batches", "vector_store": "/v1/vector_stores"}
OBJECT = "shown"  # in meta: the object as its upstream described it
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
AT_ONCE = 8  # concurrent requests to an upstream for one page
MAX_OBJECT_BYTES = 1 << 20
ASK_S = 30.0
GONE = (404, 410)


class _Described(msgspec.Struct):
    id: str
    status: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None


async def page(parts: Parts, tenant: str, kind: str, limit: int, after: str) -> dict[str, object]:
    """One page of the list, in OpenAI's form."""
    cursor: Owned | None = None
    if after:
        cursor = await parts.owned.owner(after)
        if cursor is None or cursor.tenant != tenant or cursor.kind != kind:
            raise BadRequest(f"after: no {kind} is named {after[:128]!r}", param="after")
    found = await parts.owned.owned(tenant, kind, limit=limit + 1, after=cursor)
    turns = asyncio.Semaphore(AT_ONCE)

    async def described(owned: Owned) -> bytes | None:
        if OBJECT in owned.meta:
            return with_reason(msgspec.json.encode(owned.meta[OBJECT]), owned)
        async with turns:
            return await _ask(parts, owned)

    shown = [one for one in await asyncio.gather(*map(described, found[:limit])) if one is not None]
    ids = [msgspec.json.decode(one, type=_Described).id for one in shown]
    return {
        "object": "list",
        "data": [msgspec.Raw(one) for one in shown],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(found) > limit,
    }


async def own_files(parts: Parts, batch: Owned, described: bytes) -> None:
    """A batch's output files belong to its owner."""
    made = _described(described)
    for file_id in (made.output_file_id, made.error_file_id):
        if file_id and await parts.owned.owner(file_id) is None:
            await parts.owned.remember(file_id, batch.tenant, batch.upstream, "file", {"batch": batch.id})


def shown_in(meta: Meta, described: bytes) -> Meta:
    """The meta with the object's description, if that is small enough to store."""
    with_object = {**meta, OBJECT: msgspec.Raw(described)}
    return with_object if len(msgspec.json.encode(with_object)) <= MAX_META else meta


async def _ask(parts: Parts, owned: Owned) -> bytes | None:
    """None: its upstream no longer has it."""
    asked = Outgoing("GET", f"{PATHS[owned.kind]}/{owned.id}", [], b"", False)
    try:
        body, status = await parts.upstreams.look_up(
            Target(owned.upstream, ""), asked, limit=MAX_OBJECT_BYTES, within_s=ASK_S
        )
    except UpstreamBroken as error:
        raise UpstreamFailed("the upstream's answer ended early", code="upstream_broken") from error
    if status in GONE:
        if owned.kind != "batch":  # a batch is booked anyway
            await parts.owned.forget(owned.id)
        return None
    if status != 200:
        raise UpstreamFailed(f"the upstream answered {status} for {owned.id}")
    made = _described(body)
    if owned.kind == "batch":
        await own_files(parts, owned, body)
        owned = await parts.owned.fresh(owned.id) or owned  # shows whether the gateway stopped it
    if owned.kind == "file" or (owned.kind == "batch" and made.status in ENDED):
        await parts.owned.describe(owned.id, shown_in(owned.meta, body))
    return with_reason(body, owned) if owned.kind == "batch" else body


def _described(body: bytes) -> _Described:
    try:
        return msgspec.json.decode(body, type=_Described)
    except msgspec.DecodeError:
        raise UpstreamFailed("the upstream's answer is malformed") from None
