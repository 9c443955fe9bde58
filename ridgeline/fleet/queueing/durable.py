"""DurableQueue: requests that arrive while a model has no replica, kept over a kill -9 of the front.

`hold` returns when the request is on the disk. After a restart `waiting` gives the same requests in the same
order; the router sends them when the first replica is ready and stores each answer. The client's connection
is gone by then: it sends the same request with the same key again, or asks GET /fleet/held/{id}.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.fleet.queueing.held_ledger import (
    Answer,
    Dropped,
    HeldLedger,
    HeldRequest,
    Record,
    decode_record,
    encode_record,
)
from ridgeline.fleet.queueing.journal import Journal
from ridgeline.proxy.errors import QueueRefused

COMPACT_BYTES = 16 * 1024 * 1024  # a shorter journal is never rewritten
COMPACT_SHARE = 0.5  # of the file that must be dead
RETRY_S = 30.0


class DurableQueue:
    """One journal, one router process. `clock` is monotonic; ages begin again with the process."""

    def __init__(
        self,
        path: Path,
        *,
        max_waiting: int = 10_000,
        max_bytes: int = 1 << 30,
        answer_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting, self._max_bytes, self._answer_s = max_waiting, max_bytes, answer_s
        self._clock = clock
        self._ledger = HeldLedger()
        self._journal = Journal(path)
        for data in self._journal.records:
            self._ledger.apply(decode_record(data))
        self._journal.records = []
        self.recovered = len(self._ledger.waiting)  # requests whose clients' connections are gone
        self._answered_at = dict.fromkeys(self._ledger.answers, clock())
        self._changed: dict[str, asyncio.Event] = {}
        self._dead = 0  # bytes of the journal that no longer count, about
        self._writing: dict[str, asyncio.Future[None]] = {}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    async def hold(
        self,
        key: str,
        model: str,
        path: str,
        body: bytes,
        headers: Sequence[tuple[str, str]] = (),
        tenant: str = "",
        priority: int = 1,
    ) -> str:
        """Its id, once it is on the disk. The same request with the same key again: the same id.

        KeyReused for another request with the key; QueueRefused (queue_full) when the journal is full.
        """
        known = self._ledger.find(tenant, key, path, body)
        if known is not None:
            if known in self._writing:
                await asyncio.shield(self._writing[known])
            return known
        if len(self._ledger.waiting) >= self._max_waiting or self._journal.size + len(body) > self._max_bytes:
            raise QueueRefused("queue_full", RETRY_S)
        request = HeldRequest(
            id=f"held-{secrets.token_hex(12)}",
            number=self._ledger.next_number,
            key=key,
            model=model,
            path=path,
            body=body,
            headers=tuple(headers),
            tenant=tenant,
            priority=priority,
            arrived_at=time.time(),
        )
        writing = self._writing[request.id] = self._add(request)
        await asyncio.shield(writing)
        return request.id

    def find(self, tenant: str, key: str, path: str, body: bytes) -> str | None:
        """The id of the same request, sent before with this key. KeyReused if that was another request."""
        return self._ledger.find(tenant, key, path, body)

    def id_of(self, tenant: str, name: str) -> str | None:
        """The tenant's request of this id or with this key."""
        return self._ledger.id_of(tenant, name)

    def request(self, id: str) -> HeldRequest | None:
        """None: it does not wait."""
        return self._ledger.waiting.get(id)

    def waiting(self, model: str | None = None) -> list[HeldRequest]:
        """In order of arrival, over restarts."""
        found = self._ledger.waiting.values()
        return [request for request in found if model is None or request.model == model]

    def count(self, model: str) -> int:
        """For the demand that the router reports: a request that waits asks for a replica."""
        return sum(request.model == model for request in self._ledger.waiting.values())

    def position(self, id: str) -> int:
        """1: next. 0: not waiting."""
        return next((at for at, name in enumerate(self._ledger.waiting, start=1) if name == id), 0)

    def tenant_of(self, id: str) -> str | None:
        """None: no such request. A router shows a request to its own tenant alone."""
        return self._ledger.tenant_of(id)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────

    async def answered(self, id: str, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Keep the answer until it is fetched, at most `answer_s`. A second answer changes nothing."""
        if id in self._ledger.waiting:
            self._answered_at[id] = self._clock()
            await self._add(Answer(id, status, tuple(headers), body))

    def answer(self, id: str) -> Answer | None:
        return self._ledger.answers.get(id)

    async def wait_for(self, id: str, timeout_s: float) -> Answer | None:
        """The answer as soon as there is one; None after the timeout, or if the request is dropped."""
        event = self._changed.setdefault(id, asyncio.Event())
        try:
            if id in self._ledger.waiting:
                await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return None
        finally:
            if id not in self._ledger.waiting:
                self._changed.pop(id, None)
        return self._ledger.answers.get(id)

    async def drop(self, id: str, why: str) -> None:
        """The client has its answer, or wants none: the request is forgotten."""
        if self._ledger.tenant_of(id) is not None:
            self._answered_at.pop(id, None)
            await self._add(Dropped(id, why))

    async def expire(self) -> int:
        """Forget answers that no client has fetched for `answer_s`; how many."""
        now = self._clock()
        old = [id for id, at in self._answered_at.items() if now - at >= self._answer_s]
        for id in old:
            await self.drop(id, "not fetched")
        return len(old)

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def syncs(self) -> int:
        return self._journal.syncs

    def close(self) -> None:
        self._journal.close()

    def _add(self, record: Record) -> asyncio.Future[None]:
        """In memory and in the journal's order at once; the future is done when it is on the disk."""
        self._dead += self._ledger.bytes_of(record.id) if not isinstance(record, HeldRequest) else 0
        self._ledger.apply(record)
        written = asyncio.wrap_future(self._journal.append(encode_record(record)))
        if isinstance(record, HeldRequest):
            written.add_done_callback(lambda done: self._written(record.id, done))
        else:
            if record.id in self._changed:
                self._changed[record.id].set()
            self._compact()
        return written

    def _written(self, id: str, done: asyncio.Future[None]) -> None:
        self._writing.pop(id, None)
        if not done.cancelled() and done.exception() is not None:
            self._ledger.apply(Dropped(id, "not written"))  # not kept, so not accepted

    def _compact(self) -> None:
        if self._journal.size >= COMPACT_BYTES and self._dead >= COMPACT_SHARE * self._journal.size:
            self._journal.rewrite([encode_record(record) for record in self._ledger.records()])
            self._dead = 0
