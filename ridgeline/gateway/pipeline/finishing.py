"""Finishing: ends every request once. Releases slots and reservations, writes and counts the row.

Nothing here waits. After an interrupted answer, a separate task asks the upstream for the usage and then
closes the row; if the gateway dies before, the write-ahead file has the request.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import write_fields
from ridgeline.gateway.pipeline.attempt_booking import AttemptBooking
from ridgeline.gateway.pipeline.estimating import Estimates, limit_tokens
from ridgeline.gateway.pipeline.exchange import GatewayExchange
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.refusals import Refusals

log = logging.getLogger("ridgeline.gateway")

_NOTHING = Usage()

MAX_LATE = (
    10_000  # requests that wait for an upstream's usage; beyond this, the usage seen here is booked at once
)


class Booking:
    """Writes a request's usage and cost into its row, and passes the row to ledger, log and metrics."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ours = {one.name for one in parts.settings.upstreams if one.kind == "ridgeline"}
        self.estimates = Estimates(parts)
        self.attempts = AttemptBooking(parts, self.estimates)
        self.refusals = Refusals(self._write_refused)

    def is_late(self, exchange: GatewayExchange) -> bool:
        """Whether its usage must still be requested, or counted by a tokenizer or in many steps."""
        return self._is_known_upstream(exchange) or self.estimates.is_slow(exchange)

    async def settle(self, exchange: GatewayExchange) -> None:
        """The final usage: from a ridgeline server, else estimated."""
        self.attempts.end(exchange)
        exchange.usage = await self._late_usage(exchange)
        if self.estimates.is_due(exchange):
            try:
                await self.estimates.fill(exchange)
            except Exception as error:  # of a tokenizer: use the formula
                extra = {"request_id": exchange.id, "kind": type(error).__name__}
                log.error("a tokenizer could not count a request's usage", extra=extra)
                await self.estimates.fill_by_formula(exchange)

    def settle_now(self, exchange: GatewayExchange) -> None:
        """The same without waiting."""
        if self.estimates.is_due(exchange):
            self.estimates.fill_now(exchange)

    def _is_known_upstream(self, exchange: GatewayExchange) -> bool:
        """Whether it was interrupted at a ridgeline server, which knows its usage."""
        return exchange.late_usage and exchange.row.upstream in self._ours

    async def _late_usage(self, exchange: GatewayExchange) -> Usage | None:
        """The upstream's usage of an interrupted request; else the usage seen here."""
        row = exchange.row
        if not self._is_known_upstream(exchange):
            return exchange.usage
        try:
            told = await self._parts.upstreams.usage_of(row.upstream, row.request_id, row.at_ms)
            return told or exchange.usage
        except Exception as error:
            log.warning(
                "could not ask an upstream for a request's usage",
                extra={"request_id": row.request_id, "upstream": row.upstream, "cause": str(error)},
            )
            return exchange.usage

    def close(self, exchange: GatewayExchange) -> LedgerRow:
        parts, row, usage = self._parts, exchange.row, exchange.usage or _NOTHING
        row.tokens_in, row.tokens_cached = usage.tokens_in, usage.tokens_cached
        row.tokens_cache_write, row.tokens_out = usage.tokens_cache_write, usage.tokens_out
        row.tokens_reasoning, row.usage_source = usage.tokens_reasoning, usage.source
        row.audio_ms, row.characters = usage.audio_ms, usage.characters
        if row.upstream and usage.source != "none":
            row.cost_pusd, row.price_source = parts.prices.cost(
                row.model, row.upstream, row.upstream_model, usage
            )
        for attempt in exchange.attempts[1:]:
            parts.metrics.attempt(attempt.kind, attempt.upstream, attempt.cause)
        if exchange.why or row.attempts > 1:
            row.route = msgspec.json.encode({**exchange.why, **_attempts(exchange)}).decode()
        parts.metrics.observe(row)
        if not self.refusals.takes(row):
            self._write(exchange)
        if parts.tracer is not None and exchange.trace is not None:
            parts.tracer.finish(exchange)
        return row

    def _write(self, exchange: GatewayExchange) -> None:
        parts, row = self._parts, exchange.row
        trace_id = exchange.trace.id if exchange.trace is not None else ""
        parts.ledger.close(row)
        if parts.access_log.wants_bodies and exchange.fields:
            parts.access_log.write(row, trace_id, write_fields(exchange.fields))  # after the guard
        else:
            parts.access_log.write(row, trace_id)

    def _write_refused(self, row: LedgerRow) -> None:
        self._parts.ledger.close(row)
        self._parts.access_log.write(row)


class Finishing:
    def __init__(self, parts: Parts, booking: Booking) -> None:
        self._parts = parts
        self._booking = booking
        self._late: set[asyncio.Task[None]] = set()

    def finish(self, exchange: GatewayExchange) -> None:
        now = time.monotonic()
        row = exchange.row
        if exchange.opened is not None:
            exchange.opened.abort()  # no effect if it was closed
        exchange.body = b""
        for spool in exchange.spools:
            spool.close()
        row.total_ms = (now - exchange.arrived) * 1000
        if exchange.first_at:
            row.stream_ms = (now - exchange.first_at) * 1000
        if exchange.key is None:  # no known key: counted, but no row, or any client could fill the ledger
            self._parts.metrics.refused(row.status)
            return
        self._booking.attempts.end(exchange)
        # A long answer always takes several steps: a single step would block the event loop.
        has_room = len(self._late) < MAX_LATE or self._booking.estimates.is_long(exchange)
        if self._booking.is_late(exchange) and has_room:
            task = asyncio.get_running_loop().create_task(self._finish_late(exchange))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        else:
            self._booking.settle_now(exchange)
            self._end(exchange)

    async def drained(self) -> None:
        """Wait until the ledger has every row."""
        while self._late:
            await asyncio.wait(set(self._late))
        self._booking.refusals.flush()

    async def _finish_late(self, exchange: GatewayExchange) -> None:
        try:
            await self._booking.settle(exchange)
        finally:
            self._end(exchange)

    def _end(self, exchange: GatewayExchange) -> None:
        row = exchange.row
        try:
            self._booking.close(exchange)
        except Exception as error:
            log.error(
                "a request could not be booked",
                extra={"request_id": exchange.id, "kind": type(error).__name__},
            )
        if exchange.reservation is not None:
            tokens = limit_tokens(row) + exchange.tokens_before
            self._parts.limiter.settle(exchange.reservation, tokens, row.cost_pusd + exchange.pusd_before)
        if exchange.held is not None:  # not earlier: its fields are in memory until here
            exchange.held.release()


def _attempts(exchange: GatewayExchange) -> dict[str, object]:
    """For a request with several attempts: the upstreams and outcomes."""
    if len(exchange.attempts) < 2:
        return {}
    tried = [
        {"kind": one.kind, "upstream": one.upstream, "result": one.cause or one.status}
        for one in exchange.attempts
    ]
    return {"attempts": tried}
