"""BatchBooking: enforces budgets on running batches, and books each batch once when it has ended.

One worker polls all batches that are not booked. While a batch runs, the limiter reserves its usage so far
and the estimated cost of its other lines; if a budget has no room for the next lines, the batch is cancelled
upstream. When it has ended, its row is written under the batch's id: a second worker or a restart does not
book it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from ridgeline.gateway.accounting.prices import TokenPrices
from ridgeline.gateway.accounting.row import LedgerRow, Outcome
from ridgeline.gateway.clock import unix_s
from ridgeline.gateway.errors import REVOKED, GatewayError, UpstreamFailed
from ridgeline.gateway.objects.batch_meta import BatchMeta, Stopped, meta_of
from ridgeline.gateway.objects.batch_orders import ORDER, drop_order, reservation_of
from ridgeline.gateway.objects.batch_use import (
    ASK_S,
    ENDED,
    RUNNING,
    Batch,
    Used,
    last_seen,
    used_in_all,
    used_so_far,
)
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.tenants.owned import Owned
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target

log = logging.getLogger("ridgeline.gateway")

MAX_BATCH_BYTES = 1 << 20
AT_ONCE = 8
PAGE = 100
MAX_PAGES = 20
RESTORE_AGAIN_S = 0.25  # between attempts to restore the batches of earlier processes
TIGHT_POLL_S = 1.0  # while a batch may cost more than its budget has left
UNKNOWN_S = 600.0  # a batch unknown to its upstream for this time is booked as it was last seen
ORDER_S = 60.0  # beyond the longest request: then search for the batch of an order
MAX_BOOKED = 10_000


class BatchBooking:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known_upstreams = {one.name for one in parts.settings.upstreams}
        self._missing: dict[str, float] = {}  # since when its upstream does not know it, monotonic seconds
        self._booked: OrderedDict[str, None] = OrderedDict()
        self._booking = asyncio.Lock()
        self._tight: set[str] = set()  # batches that may cost more than their budget has left
        self._made_ms = unix_s() * 1000
        self.restored = asyncio.Event()  # the batches of earlier processes are reserved

    async def run(self) -> None:
        await self._restore()
        while True:
            poll_s = self._parts.settings.gateway.batch_poll_s
            await asyncio.sleep(min(poll_s, TIGHT_POLL_S) if self._tight else poll_s)
            try:
                await self.look_after_all()
            except Exception:
                log.exception("could not poll batches; trying again")

    async def _restore(self) -> None:
        """Reserve again the cost of the batches of earlier processes. Repeats until the store answers."""
        while not self.restored.is_set():
            try:
                found = [one for kind in (ORDER, "batch") for one in await self._parts.owned.pending(kind)]
                # A later order already has its reservation, and may be settled by now.
                earlier = [one for one in found if one.created_ms < self._made_ms]
                await asyncio.gather(*(self._guarded(self._hold_again, one) for one in earlier))
                self.restored.set()
            except Exception as error:
                log.warning("batches of earlier processes are not reserved yet", extra={"cause": str(error)})
                await asyncio.sleep(RESTORE_AGAIN_S)

    async def _hold_again(self, owned: Owned) -> None:
        meta = meta_of(owned)
        cost = meta.cost_pusd if meta.held_pusd is None else meta.held_pusd
        await self._parts.limiter.hold(reservation_of(self._parts, owned), cost)

    async def look_after_all(self) -> None:
        for order in await self._parts.owned.pending(ORDER):
            longest_s = self._parts.settings.gateway.request_timeout_s + ORDER_S
            if unix_s() - order.created_ms / 1000 > longest_s:
                await self._guarded(self._find_batch, order)
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(owned: Owned) -> None:
            async with turns:
                await self._guarded(self.look_after, owned)

        await asyncio.gather(*(one(owned) for owned in await self._parts.owned.pending("batch")))

    async def look_after(self, owned: Owned) -> None:
        """Ask for its progress: reserve, stop or book it."""
        batch = await self._ask(owned)
        if batch is None:
            since = self._missing.setdefault(owned.id, time.monotonic())
            if time.monotonic() - since > UNKNOWN_S:
                await self._book(owned, "lost", last_seen(owned))
            return
        self._missing.pop(owned.id, None)
        prices = self._prices(owned)
        if batch.status in ENDED:
            await self._book(
                owned, batch.status, await used_in_all(self._parts.upstreams, owned, batch, prices)
            )
        else:
            await self._hold(owned, batch, used_so_far(batch, meta_of(owned), prices))

    async def book_before_deletion(self, batch_id: str) -> None:
        """Book a batch before its output file is deleted. Raises if that fails: the file must stay."""
        owned = await self._parts.owned.pending_one(batch_id)
        if owned is None:
            return
        await self.look_after(owned)
        if await self._parts.owned.pending_one(batch_id) is not None:
            raise GatewayError(
                "the batch of this file is not booked yet; delete the file later",
                status=409,
                code="batch_not_booked",
                headers={"retry-after": str(max(int(self._parts.settings.gateway.batch_poll_s), 1))},
            )

    # ---- while it runs ----

    async def _hold(self, owned: Owned, batch: Batch, used: Used) -> None:
        meta = meta_of(owned)
        held, stopped = used.cost_pusd + used.left_pusd, meta.stopped
        room = await self._parts.limiter.hold(reservation_of(self._parts, owned), held)
        self._tight.discard(owned.id)
        if room is not None and room < 0:
            self._tight.add(owned.id)
        step = max(used.cost_pusd - meta.spent_pusd, 1)  # it may spend as much again until the next poll
        if room is not None and room < 0 and used.left_pusd + room < step and stopped is None:
            spent = used.cost_pusd / 10**12
            message = (
                f"stopped by the gateway after {spent:.6g} USD: "
                "the budget of its key or team has no room for its next lines"
            )
            stopped = Stopped("budget_exceeded", message)
        if self._parts.keys.table.ends_requests(meta.key) and meta.stopped is None:
            stopped = Stopped(REVOKED, "stopped by the gateway: its key has been revoked")
        noted = msgspec.structs.replace(
            meta,
            used=(used.usage.tokens_in, used.usage.tokens_out),
            spent_pusd=used.cost_pusd,
            held_pusd=held,
            stopped=stopped,
        )
        if noted != meta:
            await self._parts.owned.note(owned.id, noted.stored())
        if stopped is not None and batch.status in RUNNING:
            await self._cancel(owned)

    async def _cancel(self, owned: Owned) -> None:
        """The store already has the reason: a batch that ends as cancelled is known to be stopped by us."""
        log.warning("stopping a batch", extra={"batch": owned.id})
        asked = Outgoing("POST", f"/v1/batches/{owned.id}/cancel", [], b"", False)
        status, _ = await self._answer(owned.upstream, asked)
        if status >= 400 and status != 409:  # 409: it has already ended
            raise UpstreamFailed(f"the upstream answered {status} to the cancellation of a batch")

    # ---- when it has ended ----

    async def _book(self, owned: Owned, status: str, used: Used) -> None:
        parts = self._parts
        async with self._booking:
            if owned.id not in self._booked:
                # A gateway that died may have written the row without marking it in the store.
                is_new = not await parts.ledger.has(owned.id)
                if is_new:
                    parts.ledger.close(self._row(owned, status, used))
                tokens = used.usage.tokens_in + used.usage.tokens_out
                parts.limiter.settle(reservation_of(parts, owned), tokens, used.cost_pusd if is_new else 0)
                self._booked[owned.id] = None
                if len(self._booked) > MAX_BOOKED:
                    self._booked.popitem(last=False)
            await parts.owned.settled(owned.id)
            self._missing.pop(owned.id, None)
            self._tight.discard(owned.id)

    def _row(self, owned: Owned, status: str, used: Used) -> LedgerRow:
        meta, usage = meta_of(owned), used.usage
        outcome, code, http_status = _ending(status, meta)
        at_ms = meta.at_ms or owned.created_ms
        return LedgerRow(
            owned.id,
            at_ms,
            key_id=meta.key,
            team_id=meta.team,
            endpoint="batches",
            model_asked=meta.model,
            model=meta.model,
            upstream=owned.upstream,
            upstream_model=meta.upstream_model,
            status=http_status,
            outcome=outcome,
            error_code=code,
            tokens_in=usage.tokens_in,
            tokens_cached=usage.tokens_cached,
            tokens_cache_write=usage.tokens_cache_write,
            tokens_out=usage.tokens_out,
            tokens_reasoning=usage.tokens_reasoning,
            usage_source=usage.source,
            cost_pusd=used.cost_pusd,
            price_source=self._prices(owned).source,
            total_ms=max(unix_s() * 1000 - at_ms, 0.0),
        )

    # ---- an order whose batch is unknown ----

    async def _find_batch(self, order: Owned) -> None:
        """The gateway died, or the answer was lost: find the batch with the order's file that no tenant owns.

        An order at an upstream that was removed from the configuration stays reserved for UNKNOWN_S more.
        """
        if order.upstream not in self._known_upstreams:
            since = self._missing.setdefault(order.id, time.monotonic())
            if time.monotonic() - since > UNKNOWN_S:
                del self._missing[order.id]
                await drop_order(self._parts, order)
            return
        owned, after = self._parts.owned, ""
        for _ in range(MAX_PAGES):
            path = f"/v1/batches?limit={PAGE}" + (f"&after={after}" if after else "")
            status, body = await self._answer(order.upstream, Outgoing("GET", path, [], b"", False))
            if status != 200:
                raise UpstreamFailed(f"the upstream answered {status} to a request for its batches")
            page = msgspec.json.decode(body, type=_Page)
            for batch in page.data:
                mine = batch.input_file_id == meta_of(order).input_file_id
                if mine and batch.id and await owned.owner(batch.id) is None:
                    await owned.rename(order.id, batch.id, "batch")
                    return
            if not page.has_more or not page.data:
                break
            after = page.data[-1].id
        await drop_order(self._parts, order)

    # ---- asking ----

    async def _guarded(self, look: Callable[[Owned], Awaitable[None]], owned: Owned) -> None:
        """A failure with one batch does not affect the others."""
        try:
            await look(owned)
        except (GatewayError, msgspec.DecodeError, OSError) as error:
            _warn("could not poll a batch", owned, error)
        except Exception:
            log.exception("could not poll a batch", extra={"batch": owned.id})

    async def _ask(self, owned: Owned) -> Batch | None:
        """None if its upstream does not know it, or is not configured any longer."""
        if owned.upstream not in self._known_upstreams:
            return None
        status, body = await self._answer(
            owned.upstream, Outgoing("GET", f"/v1/batches/{owned.id}", [], b"", False)
        )
        if status == 404:
            return None
        if status != 200:
            raise UpstreamFailed(f"the upstream answered {status} to a request for a batch")
        return msgspec.json.decode(body, type=Batch)

    async def _answer(self, upstream: str, asked: Outgoing) -> tuple[int, bytes]:
        opened = await self._parts.upstreams.open(
            [Target(upstream, "")],
            lambda _: asked,
            tenant="",
            deadline=time.monotonic() + ASK_S,
            repeatable=asked.method == "GET",
        )
        try:
            body = await opened.read(MAX_BATCH_BYTES)
            opened.close(opened.answer.status < 500)
            return opened.answer.status, body
        finally:
            opened.abort()

    def _prices(self, owned: Owned) -> TokenPrices:
        meta = meta_of(owned)
        return self._parts.prices.of(meta.model, owned.upstream, meta.upstream_model)


class _Page(msgspec.Struct):
    data: list[Batch] = []
    has_more: bool = False


def _ending(status: str, meta: BatchMeta) -> tuple[Outcome, str, int]:
    if meta.stopped is not None and status == "cancelled":
        code = meta.stopped.code
        return ("invalid", code, 401) if code == REVOKED else ("limited", code, 429)
    if status == "completed":
        return "ok", "", 200
    return "upstream_failed", f"batch_{status}", 200


def _warn(what: str, owned: Owned, error: Exception) -> None:
    log.warning(what, extra={"batch": owned.id, "cause": str(error)})
