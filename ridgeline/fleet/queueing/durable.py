"""DurableQueue: requests that arrive while a model has no replica. They survive a kill -9 of the router.

`hold` returns when the request is on the disk. After a restart `waiting` returns the same requests in the
same order; the router sends them when the first replica is ready and stores each answer. By then the client
has lost its connection: it sends the same request with the same key again, or reads GET /fleet/held/{id}.
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
from ridgeline.fleet.queueing.journal import HEAD, Journal
from ridgeline.proxy.errors import QueueRefused

COMPACT_BYTES = 16 * 1024 * 1024  # a shorter journal is never rewritten
COMPACT_SHARE = 0.5  # share of the file that must be dead before a rewrite
FULL_SHARE = 0.05  # the same, if a request would be refused otherwise
RETRY_S = 30.0


class DurableQueue:
    """One journal belongs to one router process. `clock` is monotonic; ages start at 0 with the process."""

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
        self.recovered = len(self._ledger.waiting)  # requests whose clients have disconnected
        self.appended = 0  # requests that are on the disk
        now, today = clock(), time.time()
        self._since = {  # when each began to wait, by `clock`
            one.id: now - max(today - one.arrived_at, 0.0) for one in self._ledger.waiting.values()
        }
        self._answered_at = dict.fromkeys(self._ledger.answers, clock())
        self._changed: dict[str, asyncio.Event] = {}
        live = sum(HEAD + len(encode_record(record)) for record in self._ledger.records())
        self._dead = max(self._journal.size - live, 0)  # estimate of the journal's dead bytes
        self._is_behind = False  # the file lacks records of answers or drops, or has refused requests
        self._is_rewriting = False
        self._rewrites = 0
        self._rewrite_from = clock()  # later after a failed rewrite
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
        """The request's id, once it is on the disk. The same request with the same key has the same id.

        KeyReused if the key belongs to another request; QueueRefused (queue_full) if the journal is full.
        """
        known = self._ledger.find(tenant, key, path, body)
        if known is not None:
            if known in self._writing:
                await asyncio.shield(self._writing[known])
            return known
        if self._is_full(body) and self._dead >= FULL_SHARE * self._journal.size:
            self._rewrite()
        if len(self._ledger.waiting) >= self._max_waiting or self._is_full(body):
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
        """The id of this request, if it was sent before with this key. KeyReused if the key has another."""
        return self._ledger.find(tenant, key, path, body)

    def id_of(self, tenant: str, name: str) -> str | None:
        """The tenant's request with this id or key."""
        return self._ledger.id_of(tenant, name)

    def request(self, id: str) -> HeldRequest | None:
        """None if no such request waits."""
        return self._ledger.waiting.get(id)

    def waiting(self, model: str | None = None) -> list[HeldRequest]:
        """In order of arrival, also across restarts."""
        found = self._ledger.waiting.values()
        return [request for request in found if model is None or request.model == model]

    def count(self, model: str) -> int:
        """The number of waiting requests of a model: part of the demand that the router reports."""
        return sum(request.model == model for request in self._ledger.waiting.values())

    def oldest_s(self) -> float:
        """How long the oldest request has waited, also over restarts."""
        oldest = next(iter(self._ledger.waiting), None)
        return 0.0 if oldest is None else max(self._clock() - self._since.get(oldest, self._clock()), 0.0)

    def position(self, id: str) -> int:
        """1 is the next request; 0 means that it does not wait."""
        return next((at for at, name in enumerate(self._ledger.waiting, start=1) if name == id), 0)

    def tenant_of(self, id: str) -> str | None:
        """None if there is no such request. A router shows a request only to the tenant that sent it."""
        return self._ledger.tenant_of(id)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────

    async def answered(self, id: str, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Keep the answer until it is fetched, at most for `answer_s`. A second answer is ignored."""
        if id in self._ledger.waiting:
            self._answered_at[id] = self._clock()
            await asyncio.shield(self._add(Answer(id, status, tuple(headers), body)))

    def answer(self, id: str) -> Answer | None:
        return self._ledger.answers.get(id)

    async def wait_for(self, id: str, timeout_s: float) -> Answer | None:
        """Wait for the answer; None after the timeout, or if the request is dropped."""
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
        """Forget the request: the client has its answer, or cancelled."""
        if self._ledger.tenant_of(id) is not None:
            self._answered_at.pop(id, None)
            await asyncio.shield(self._add(Dropped(id, why)))

    async def expire(self) -> int:
        """Forget answers that were not fetched within `answer_s`. Returns their number."""
        if self._is_behind:
            self._rewrite()
        now = self._clock()
        old = [id for id, at in self._answered_at.items() if now - at >= self._answer_s]
        for id in old:
            await self.drop(id, "not fetched")
        return len(old)

    @property
    def answers(self) -> int:
        """How many are kept."""
        return len(self._ledger.answers)

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._journal.size

    @property
    def syncs(self) -> int:
        return self._journal.syncs

    def close(self) -> None:
        if self._is_behind:
            self._journal.rewrite(self._encoded())
        self._journal.close()

    def _add(self, record: Record) -> asyncio.Future[None]:
        """Apply a record and append it to the journal. The future is done when it is on the disk."""
        data = encode_record(record)
        if not isinstance(record, HeldRequest):
            self._dead += self._ledger.bytes_of(record.id) + (len(data) if isinstance(record, Dropped) else 0)
        self._ledger.apply(record)
        written = asyncio.wrap_future(self._journal.append(data))
        rewrites = self._rewrites
        written.add_done_callback(lambda done: self._written(record, rewrites, done))
        if isinstance(record, HeldRequest):
            self._since[record.id] = self._clock()
        else:
            self._since.pop(record.id, None)
            if record.id in self._changed:
                self._changed[record.id].set()
            self._compact()
        return written

    def _written(self, record: Record, rewrites: int, done: asyncio.Future[None]) -> None:
        """rewrites: how many had begun when the record was appended."""
        self._writing.pop(record.id, None)
        if done.cancelled():
            return
        if done.exception() is None:
            self.appended += isinstance(record, HeldRequest)
            if self._is_behind:  # there is room again
                self._rewrite()
        elif not isinstance(record, HeldRequest):
            self._is_behind = True
        else:
            self._ledger.apply(Dropped(record.id, "not written"))  # not stored, so not accepted
            self._since.pop(record.id, None)
            self._is_behind |= rewrites != self._rewrites  # a rewrite may have stored it

    def _is_full(self, body: bytes) -> bool:
        return self._journal.size + len(body) > self._max_bytes

    def _compact(self) -> None:
        if self._journal.size >= COMPACT_BYTES and self._dead >= COMPACT_SHARE * self._journal.size:
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the journal by the shortest one. Not again for RETRY_S after that has failed."""
        if self._is_rewriting or self._clock() < self._rewrite_from:
            return
        dead, was_behind = self._dead, self._is_behind
        self._rewrites, self._is_rewriting, self._is_behind = self._rewrites + 1, True, False
        written = asyncio.wrap_future(self._journal.rewrite(self._encoded()))
        written.add_done_callback(lambda done: self._rewritten(dead, was_behind, done))

    def _rewritten(self, dead: int, was_behind: bool, done: asyncio.Future[None]) -> None:
        self._is_rewriting = False
        if not done.cancelled() and done.exception() is None:
            self._dead -= dead
        else:
            self._is_behind |= was_behind
            self._rewrite_from = self._clock() + RETRY_S

    def _encoded(self) -> list[bytes]:
        return [encode_record(record) for record in self._ledger.records()]
