"""Owned: whose a file, a batch or a stored response is, and which upstream holds it.

Asked by the pipeline before it forwards anything that names an object. An owner is never replaced: an id
that a second upstream gives out again stays with the first tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict

import msgspec

from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.tenants.database import Work, statement
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.store import Store

MAX_ID = 256
MAX_WAITING = 10_000  # objects that wait to be written: far more than a store that answers ever sees
MAX_BATCH = 500
PRUNE_EVERY = 1000  # objects of one tenant between two looks at its bound


class Owner(msgspec.Struct, frozen=True):
    tenant: str
    upstream: str
    kind: str = ""  # file, batch, response
    created_ms: int = 0


class OwnedObject(msgspec.Struct, frozen=True):
    id: str
    owner: Owner


class Owned:
    def __init__(self, store: Store, *, remembered: int = 50_000) -> None:
        """remembered: the most recently used owners that this process answers for without the store."""
        self._store = store
        self._capacity = remembered
        self._known: OrderedDict[str, Owner] = OrderedDict()
        self._waiting: dict[str, tuple[Owner, asyncio.Future[bool]]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._since_prune: Counter[str] = Counter()

    async def remember(self, object_id: str, tenant: str, upstream: str, kind: str = "") -> bool:
        """Returns when it is in the store, for every worker to see; False: another tenant has this id.

        What comes at the same time shares a transaction.
        """
        if not 0 < len(object_id) <= MAX_ID:
            raise BadRequest(f"an object's id must have from 1 to {MAX_ID} characters", code="invalid_id")
        if object_id in self._waiting:
            owner, done = self._waiting[object_id]
            return await asyncio.shield(done) and owner.tenant == tenant
        if len(self._waiting) >= MAX_WAITING:
            raise StoreUnavailable("too much waits for it")
        done = asyncio.get_running_loop().create_future()
        self._waiting[object_id] = (Owner(tenant, upstream, kind, int(time.time() * 1000)), done)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="owned-objects")
        return await asyncio.shield(done)

    async def owner(self, object_id: str) -> Owner | None:
        owner = self._known.get(object_id)
        if owner is not None:
            self._known.move_to_end(object_id)
            return owner
        if not 0 < len(object_id) <= MAX_ID:
            return None
        rows = await self._store.ask(
            "SELECT tenant, upstream, kind, created_ms FROM ridgeline_owned WHERE object_id = ?", object_id
        )
        if not rows:
            return None  # not kept: another worker may remember it in a moment
        owner = Owner(*rows[0])
        self._keep(object_id, owner)
        return owner

    async def forget(self, object_id: str, tenant: str) -> bool:
        """True if it was this tenant's. Other workers may name the owner a while longer."""
        if not 0 < len(object_id) <= MAX_ID:
            return False
        gone = await self._store.write(
            statement(
                "DELETE FROM ridgeline_owned WHERE object_id = ? AND tenant = ? RETURNING object_id",
                *(object_id, tenant),
            )
        )
        if gone:
            self._known.pop(object_id, None)
        return bool(gone)

    async def list(
        self, tenant: str, kind: str, *, before_ms: int | None = None, limit: int = 100
    ) -> list[OwnedObject]:
        """A tenant's own, the newest first."""
        rows = await self._store.ask(
            "SELECT object_id, tenant, upstream, kind, created_ms FROM ridgeline_owned"
            " WHERE tenant = ? AND kind = ? AND created_ms < ? ORDER BY created_ms DESC, object_id LIMIT ?",
            *(tenant, kind, 2**62 if before_ms is None else before_ms, limit),
        )
        return [OwnedObject(id, Owner(*rest)) for id, *rest in rows]

    async def close(self) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _keep(self, object_id: str, owner: Owner) -> None:
        self._known[object_id] = owner
        self._known.move_to_end(object_id)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    async def _write(self) -> None:
        """Until nothing waits: one transaction after the other, each with all that came meanwhile."""
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[:MAX_BATCH])
                try:
                    kept = await self._store.write(
                        self._insert({id: owner for id, (owner, _) in batch.items()})
                    )
                except Exception as error:
                    self._settle(batch, None, error)
                else:
                    self._settle(batch, kept, None)
        finally:
            self._writer = None

    def _settle(
        self,
        batch: dict[str, tuple[Owner, asyncio.Future[bool]]],
        kept: dict[str, Owner] | None,
        error: Exception | None,
    ) -> None:
        for id, (owner, done) in batch.items():
            del self._waiting[id]
            if kept is not None:
                self._keep(id, kept[id])
            if done.done():
                continue
            if kept is not None:
                done.set_result(kept[id].tenant == owner.tenant)
            else:
                assert error is not None
                done.set_exception(error)
                done.exception()  # seen, even where its waiter has gone

    def _insert(self, owners: dict[str, Owner]) -> Work[dict[str, Owner]]:
        """Who owns each of them afterwards."""
        kept = {}
        for id, owner in sorted(owners.items()):  # one order everywhere: no two gateways wait for each other
            added = yield (
                "INSERT INTO ridgeline_owned (object_id, tenant, upstream, kind, created_ms)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT (object_id) DO NOTHING RETURNING object_id",
                (id, owner.tenant, owner.upstream, owner.kind, owner.created_ms),
            )
            if added:
                kept[id] = owner
                self._since_prune[owner.tenant] += 1
            else:
                columns = "SELECT tenant, upstream, kind, created_ms FROM ridgeline_owned WHERE object_id = ?"
                ((*fields,),) = yield columns, (id,)
                kept[id] = Owner(*fields)
        for tenant in {owner.tenant for owner in owners.values()}:
            if self._since_prune[tenant] >= PRUNE_EVERY:
                del self._since_prune[tenant]
                yield from _prune(tenant, self._store.config.max_owned)
        return kept


def _prune(tenant: str, keep: int) -> Work[None]:
    yield (
        "DELETE FROM ridgeline_owned WHERE object_id IN (SELECT object_id FROM ridgeline_owned"
        " WHERE tenant = ? ORDER BY created_ms DESC, object_id LIMIT 10000 OFFSET ?)",
        (tenant, keep),
    )
