"""Heads: the record of each namespace in Qdrant, and the writes that it makes whole.

Qdrant has no transactions. So every point has the revision that wrote it (`born`) and the one that replaced
it (`died`), and the head names the last revision that is whole. Readers see what is alive at that revision.
A write makes its points under the next revision and then changes the head, in one conditional request:
before it nothing of the write is seen, after it everything. The next writer undoes what an interrupted one
left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from ridgeline.retrieval.errors import NamespaceNotFound, StoreUnavailable
from ridgeline.retrieval.stores.qdrant_api import Condition, Point, QdrantApi, matches, within
from ridgeline.retrieval.types import Namespace, NamespaceSpec, check_spec

ALIVE = 1 << 53  # `died` of what is not replaced
LEASE_S = 60.0  # a writer that has not renewed its lease for this long is taken for dead
SWEEP_EVERY = 64  # revisions between removals of dead points
_KEPT_COMMITS = 16
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Head:
    """space: the namespace's own id, never used again. swept: dead points up to this revision are gone."""

    point: str
    namespace: Namespace
    space: str
    spec: NamespaceSpec
    revision: int = 0
    swept: int = 0
    documents: int = 0
    chunks: int = 0
    bytes: int = 0
    next_number: int = 0
    writer: str = ""
    until: float = 0.0
    commits: tuple[str, ...] = ()
    dropped: bool = False

    @property
    def seen(self) -> list[Condition]:
        """What a reader of this revision sees."""
        return [
            matches("space", self.space),
            within("born", lte=self.revision),
            within("died", gt=self.revision),
        ]

    def payload(self) -> dict[str, object]:
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        del fields["point"], fields["namespace"], fields["spec"]
        return fields | {
            "kind": "namespace",
            "tenant": self.namespace.tenant,
            "name": self.namespace.name,
            "dimensions": self.spec.dimensions,
            "model": self.spec.embedding_model,
        }

    @classmethod
    def of(cls, point: Point) -> Head:
        fields = dict(point["payload"])
        fields.pop("kind")
        namespace = Namespace(fields.pop("tenant"), fields.pop("name"))
        spec = NamespaceSpec(fields.pop("dimensions"), fields.pop("model"))
        commits = tuple(fields.pop("commits"))
        return cls(point["id"], namespace=namespace, spec=spec, commits=commits, **fields)


class Heads:
    def __init__(self, api: QdrantApi, records: str, chunks_of: Callable[[int], str]) -> None:
        """records: the collection of heads, documents and texts. chunks_of: that of chunks, by dimensions."""
        self._api, self._records, self._chunks_of = api, records, chunks_of
        self._locks: dict[str, asyncio.Lock] = {}  # writers of this process wait here, others by the lease

    async def get(self, namespace: Namespace) -> Head:
        head = await self._read(_point_of(namespace))
        if head is None or head.dropped:
            raise NamespaceNotFound(f"there is no vector store {namespace.name!r}")
        return head

    async def create(self, namespace: Namespace, spec: NamespaceSpec) -> None:
        point = _point_of(namespace)
        head = await self._read(point)
        if head is not None and head.dropped:
            await self._remove(head)
            head = None
        if head is None:
            made = Head(point, namespace, uuid.uuid4().hex, spec)
            # The filter keeps a head that another process made meanwhile.
            body = {
                "points": [{"id": point, "vector": {}, "payload": made.payload()}],
                "update_filter": {"must": [{"has_id": []}]},
            }
            await self._api.ask("PUT", f"/collections/{self._records}/points?wait=true", body)
            head = await self.get(namespace)
        check_spec(namespace, head.spec, spec)

    async def drop(self, namespace: Namespace) -> str | None:
        """The space that it had."""
        head = await self._read(_point_of(namespace))
        if head is None or head.dropped:
            return None
        await self._api.set_payload(self._records, {"dropped": True}, _is(head))
        await self._remove(head)
        return head.space

    async def finish_drops(self) -> None:
        """Remove what a process that died in `drop` has left."""
        where = {"must": [matches("kind", "namespace"), matches("dropped", True)]}
        for point in await self._api.found(self._records, where):
            await self._remove(Head.of(point))

    async def of_tenant(self, tenant: str) -> list[Head]:
        where = {"must": [matches("kind", "namespace"), matches("tenant", tenant), matches("dropped", False)]}
        heads = [Head.of(point) for point in await self._api.found(self._records, where)]
        return sorted(heads, key=lambda head: head.namespace.name)

    @contextlib.asynccontextmanager
    async def write(self, namespace: Namespace) -> AsyncIterator[Write]:
        """The next revision of a namespace, for one writer. Without `commit` nothing of it is kept."""
        lock = self._locks.setdefault(_point_of(namespace), asyncio.Lock())
        async with lock:
            write = Write(self._api, self._records, self._chunks_of, await self._taken(namespace))
            try:
                yield write
            finally:
                if not write.is_committed:
                    # The next writer undoes the rest when the lease is over.
                    with contextlib.suppress(StoreUnavailable):
                        await asyncio.shield(write.undo())

    async def _taken(self, namespace: Namespace) -> Head:
        """The head with this process's lease on it; what a dead writer left is undone."""
        while True:
            head, now = await self.get(namespace), time.time()
            if not head.writer or head.until < now:
                token = uuid.uuid4().hex
                where = {"must": [*_is(head)["must"], matches("writer", head.writer)]}
                lease = {"writer": token, "until": now + LEASE_S}
                await self._api.set_payload(self._records, lease, where)
                taken = await self.get(namespace)
                if taken.writer == token:
                    if head.writer:
                        await undone(self._api, self._records, self._chunks_of(head.spec.dimensions), taken)
                    return taken
            await asyncio.sleep(_POLL_S)

    async def _read(self, point: str) -> Head | None:
        found = await self._api.ask("GET", f"/collections/{self._records}/points/{point}", known=(404,))
        return None if found is None else Head.of(found)

    async def _remove(self, head: Head) -> None:
        of_space = {"must": [matches("space", head.space)], "must_not": [{"has_id": [head.point]}]}
        await self._api.delete(self._chunks_of(head.spec.dimensions), of_space)
        await self._api.delete(self._records, of_space)
        await self._api.delete(self._records, _is(head))


class Write:
    """One revision in the making. `head` is the last whole one."""

    def __init__(self, api: QdrantApi, records: str, chunks_of: Callable[[int], str], head: Head) -> None:
        self._api, self._records, self.head = api, records, head
        self._chunks = chunks_of(head.spec.dimensions)
        self.revision = head.revision + 1
        self.is_committed = False

    async def add(self, points: list[Point], *, is_chunks: bool) -> None:
        """Points with `space`, `born` and `died` in their payload, as `stamped` gives them."""
        await self._renew()
        await self._api.upsert(self._chunks if is_chunks else self._records, points)

    def stamped(self, payload: dict[str, object]) -> dict[str, object]:
        return payload | {"space": self.head.space, "born": self.revision, "died": ALIVE}

    async def bury(self, document: str) -> None:
        """Mark a document and its chunks as replaced by this revision."""
        where = {"must": [*self.head.seen, matches("document", document)]}
        for collection in (self._records, self._chunks):
            await self._api.set_payload(collection, {"died": self.revision}, where)

    async def commit(self, documents: int, chunks: int, octets: int, next_number: int) -> None:
        head = self.head
        sweeps = self.revision - head.swept >= SWEEP_EVERY
        made = replace(
            head,
            revision=self.revision,
            documents=head.documents + documents,
            chunks=head.chunks + chunks,
            bytes=head.bytes + octets,
            next_number=next_number,
            writer="",
            until=0.0,
            # A reader of an earlier revision notices that its points may be gone, and reads again.
            swept=self.revision if sweeps else head.swept,
            commits=(*head.commits[-_KEPT_COMMITS:], head.writer),
        )
        where = {"must": [*_is(head)["must"], matches("writer", head.writer)]}
        await self._api.set_payload(self._records, made.payload(), where)
        now = await self._api.ask("GET", f"/collections/{self._records}/points/{head.point}", known=(404,))
        if now is None:
            raise NamespaceNotFound(f"there is no vector store {head.namespace.name!r}")
        if head.writer not in now["payload"]["commits"]:
            raise StoreUnavailable("another process took over this write, as it had made no progress")
        self.is_committed = True
        if sweeps:
            dead = {"must": [matches("space", head.space), within("died", lte=self.revision)]}
            for collection in (self._records, self._chunks):
                await self._api.delete(collection, dead)

    async def undo(self) -> None:
        await self._renew()
        await undone(self._api, self._records, self._chunks, self.head)
        where = {"must": [*_is(self.head)["must"], matches("writer", self.head.writer)]}
        await self._api.set_payload(self._records, {"writer": "", "until": 0.0}, where)

    async def _renew(self) -> None:
        now = time.time()
        if self.head.until - now < LEASE_S / 2:
            where = {"must": [*_is(self.head)["must"], matches("writer", self.head.writer)]}
            await self._api.set_payload(self._records, {"until": now + LEASE_S}, where)
            self.head = replace(self.head, until=now + LEASE_S)


async def undone(api: QdrantApi, records: str, chunks: str, head: Head) -> None:
    """Remove the points of the revision after the head's, and bring back what it replaced."""
    later = {"must": [matches("space", head.space), within("born", gt=head.revision)]}
    buried = {
        "must": [matches("space", head.space), within("died", gt=head.revision, lt=ALIVE)],
    }
    for collection in (records, chunks):
        await api.delete(collection, later)
        await api.set_payload(collection, {"died": ALIVE}, buried)


def _is(head: Head) -> Condition:
    return {"must": [{"has_id": [head.point]}, matches("space", head.space)]}


def _point_of(namespace: Namespace) -> str:
    """The same for all processes; tenant and name cannot run into each other."""
    tenant, name = namespace.tenant.encode(), namespace.name.encode()
    digest = hashlib.blake2b(b"%d:%s%s" % (len(tenant), tenant, name), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest))
