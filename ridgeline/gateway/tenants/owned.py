"""OwnedObjects: the owner and the upstream of each file, batch and stored response.

Used by the pipeline before it forwards a request that names an object. An owner is never replaced: an id that
a second upstream uses again stays with the first tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import TypeAlias

import msgspec

from ridgeline.gateway.clock import unix_s
from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.store import Store
from ridgeline.storage.database import Row, Work, statement

MAX_ID = 256
MAX_META = 16 * 1024  # bytes, as JSON
MAX_WAITING = 10_000  # objects that wait to be written: far more than with a working store
MAX_BATCH = 500
PENDING = ("batch", "batch_order")  # kinds that are pending until they are settled
PRUNE_EVERY = 1000  # new objects of one tenant between checks of its limit
MAX_PRUNED = 10_000

Meta: TypeAlias = dict[str, object]  # JSON; its fields depend on the object's kind

_COLUMNS = "object_id, tenant, upstream, kind, created_ms, meta"


class Owned(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    upstream: str
    kind: str  # file, batch, response, vector_store
    created_ms: int = 0
    meta: Meta = {}  # data for later requests; small, and never content


class OwnedObjects:
    def __init__(self, store: Store, *, remembered: int = 50_000) -> None:
        """remembered: size of the LRU cache of owners in this process."""
        self._store = store
        self._capacity = remembered
        self._known: OrderedDict[str, Owned] = OrderedDict()
        self._waiting: dict[str, tuple[Owned, asyncio.Future[bool]]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._since_prune: Counter[str] = Counter()

    async def remember(
        self, object_id: str, tenant: str, upstream: str, kind: str, meta: Meta | None = None
    ) -> bool:
        """Returns when it is in the store, visible to every worker; False: another tenant has this id.

        Concurrent calls share a transaction. A batch is pending until it is `settled`.
        """
        if not 0 < len(object_id) <= MAX_ID or "\0" in object_id:
            raise BadRequest(f"an object's id must have from 1 to {MAX_ID} characters", code="invalid_id")
        if object_id in self._waiting:
            other, done = self._waiting[object_id]
            return await asyncio.shield(done) and other.tenant == tenant
        if len(self._waiting) >= MAX_WAITING:
            raise StoreUnavailable("too many writes are waiting")
        owned = Owned(object_id, tenant, upstream, kind, int(unix_s() * 1000), meta or {})
        if len(msgspec.json.encode(owned.meta)) > MAX_META:
            raise BadRequest(f"the meta of an object is larger than {MAX_META} bytes")
        done = asyncio.get_running_loop().create_future()
        self._waiting[object_id] = (owned, done)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="owned-objects")
        return await asyncio.shield(done)

    async def owner(self, object_id: str) -> Owned | None:
        owned = self._known.get(object_id)
        if owned is not None:
            self._known.move_to_end(object_id)
            return owned
        if not 0 < len(object_id) <= MAX_ID or "\0" in object_id:
            return None
        rows = await self._store.ask(f"SELECT {_COLUMNS} FROM ridgeline_owned WHERE object_id = ?", object_id)
        if not rows:
            return None  # not cached: another worker may add it soon
        owned = _owned(rows[0])
        self._keep(owned)
        return owned

    async def forget(self, object_id: str) -> None:
        """Other workers may return its owner for a while; its upstream no longer has the object."""
        await self._store.write(statement("DELETE FROM ridgeline_owned WHERE object_id = ?", object_id))
        self._known.pop(object_id, None)

    async def owned(
        self, tenant: str, kind: str, *, limit: int = 100, after: Owned | None = None
    ) -> list[Owned]:
        """A tenant's own of one kind, the newest first; with `after`, those that follow it."""
        at_ms, last_id = (2**62, "") if after is None else (after.created_ms, after.id)
        rows = await self._store.ask(
            f"SELECT {_COLUMNS} FROM ridgeline_owned WHERE tenant = ? AND kind = ?"
            " AND (created_ms < ? OR (created_ms = ? AND object_id > ?))"
            " ORDER BY created_ms DESC, object_id LIMIT ?",
            *(tenant, kind, at_ms, at_ms, last_id, limit),
        )
        return [_owned(row) for row in rows]

    async def describe(self, object_id: str, meta: Meta) -> None:
        """Replace the meta of an object that is not pending."""
        text = msgspec.json.encode(meta).decode()
        sql = "UPDATE ridgeline_owned SET meta = ? WHERE object_id = ? AND pending = 0"
        await self._store.write(statement(sql, text, object_id))
        self._known.pop(object_id, None)

    async def pending(self, kind: str) -> list[Owned]:
        """Pending objects of all tenants, oldest first."""
        found: list[Owned] = []
        after_ms, after_id = -1, ""
        while True:
            rows = await self._store.ask(
                f"SELECT {_COLUMNS} FROM ridgeline_owned WHERE pending = 1 AND kind = ?"
                " AND (created_ms > ? OR (created_ms = ? AND object_id > ?))"
                " ORDER BY created_ms, object_id LIMIT ?",
                *(kind, after_ms, after_ms, after_id, MAX_BATCH),
            )
            found += map(_owned, rows)
            if len(rows) < MAX_BATCH:
                return found
            after_ms, after_id = found[-1].created_ms, found[-1].id

    async def pending_one(self, object_id: str) -> Owned | None:
        sql = f"SELECT {_COLUMNS} FROM ridgeline_owned WHERE object_id = ? AND pending = 1"
        rows = await self._store.ask(sql, object_id)
        return _owned(rows[0]) if rows else None

    async def fresh(self, object_id: str) -> Owned | None:
        """As `owner`, but read from the store, with changes of other workers."""
        self._known.pop(object_id, None)
        return await self.owner(object_id)

    async def note(self, object_id: str, meta: Meta) -> None:
        """Replace the meta of a pending object."""
        text = msgspec.json.encode(meta).decode()
        sql = "UPDATE ridgeline_owned SET meta = ? WHERE object_id = ? AND pending = 1"
        await self._store.write(statement(sql, text, object_id))
        self._known.pop(object_id, None)

    async def rename(self, object_id: str, new_id: str, kind: str) -> bool:
        """In one step. False: an object of the new name already exists."""
        if not 0 < len(new_id) <= MAX_ID or "\0" in new_id:
            raise BadRequest(f"an object's id must have from 1 to {MAX_ID} characters", code="invalid_id")
        renamed = await self._store.write(_rename(object_id, new_id, kind))
        self._known.pop(object_id, None)
        return renamed

    async def settled(self, object_id: str) -> bool:
        """Mark it as no longer pending; True only for the first worker."""
        sql = "UPDATE ridgeline_owned SET pending = 0 WHERE object_id = ? AND pending = 1 RETURNING object_id"
        return bool(await self._store.write(statement(sql, object_id)))

    async def close(self) -> None:
        """Waits for running writes."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _keep(self, owned: Owned) -> None:
        self._known[owned.id] = owned
        self._known.move_to_end(owned.id)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    async def _write(self) -> None:
        """Writes until nothing waits: one transaction after the other, each with all new objects."""
        try:
            while self._waiting:
                batch = list(self._waiting.values())[:MAX_BATCH]
                try:
                    kept = await self._store.write(self._insert([owned for owned, _ in batch]))
                except Exception as error:
                    self._failed(batch, error)
                else:
                    self._kept(batch, kept)
        finally:
            self._writer = None

    def _kept(self, batch: list[tuple[Owned, asyncio.Future[bool]]], kept: dict[str, Owned]) -> None:
        for owned, done in batch:
            del self._waiting[owned.id]
            self._keep(kept[owned.id])
            if not done.done():
                done.set_result(kept[owned.id].tenant == owned.tenant)

    def _failed(self, batch: list[tuple[Owned, asyncio.Future[bool]]], error: Exception) -> None:
        for owned, done in batch:
            del self._waiting[owned.id]
            if not done.done():
                done.set_exception(error)
                done.exception()  # retrieved, even if its waiter was cancelled

    def _insert(self, batch: list[Owned]) -> Work[dict[str, Owned]]:
        """The owner of each object afterwards."""
        kept = {}
        for owned in sorted(
            batch, key=lambda one: one.id
        ):  # a fixed order: prevents deadlocks between gateways
            meta, pending = msgspec.json.encode(owned.meta).decode(), int(owned.kind in PENDING)
            added = yield (
                f"INSERT INTO ridgeline_owned ({_COLUMNS}, pending) VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (object_id) DO NOTHING RETURNING object_id",
                (owned.id, owned.tenant, owned.upstream, owned.kind, owned.created_ms, meta, pending),
            )
            kept[owned.id] = owned
            if added:
                self._since_prune[owned.tenant] += 1
            else:
                rows = yield f"SELECT {_COLUMNS} FROM ridgeline_owned WHERE object_id = ?", (owned.id,)
                kept[owned.id] = _owned(rows[0])
        for tenant in sorted({owned.tenant for owned in batch}):
            if self._since_prune[tenant] >= PRUNE_EVERY:
                del self._since_prune[tenant]
                yield from _prune(tenant, self._store.config.max_owned)
        return kept


def _rename(object_id: str, new_id: str, kind: str) -> Work[bool]:
    if (yield "SELECT 1 FROM ridgeline_owned WHERE object_id = ?", (new_id,)):
        return False
    sql = "UPDATE ridgeline_owned SET object_id = ?, kind = ? WHERE object_id = ? RETURNING object_id"
    return bool((yield sql, (new_id, kind, object_id)))


def _prune(tenant: str, keep: int) -> Work[None]:
    """Pending objects stay: they are not booked yet. So do vector stores, which are used for long."""
    yield (
        "DELETE FROM ridgeline_owned WHERE pending = 0 AND kind <> 'vector_store' AND object_id IN"
        " (SELECT object_id FROM ridgeline_owned WHERE tenant = ?"
        f" ORDER BY created_ms DESC, object_id LIMIT {MAX_PRUNED} OFFSET ?)",
        (tenant, keep),
    )


def _owned(row: Row) -> Owned:
    object_id, tenant, upstream, kind, created_ms, meta = row
    return Owned(object_id, tenant, upstream, kind, created_ms, msgspec.json.decode(meta))
