"""Finishing: ends every request once. Releases slots and reservations, writes and counts the row.

Nothing here waits. After an interrupted answer, a separate task asks the upstream for the usage and then
closes the row; if the gateway dies before, the write-ahead file has the request.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ridgeline.gateway.pipeline.booking import Booking
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState
from ridgeline.gateway.pipeline.usage_estimates import limit_tokens

log = logging.getLogger("ridgeline.gateway")

# Requests that wait for an upstream's usage; beyond this, the usage seen here is booked at once.
MAX_LATE = 10_000


class Finishing:
    def __init__(self, parts: Parts, booking: Booking) -> None:
        self._parts = parts
        self._booking = booking
        self._late: set[asyncio.Task[None]] = set()

    def finish(self, request: RequestState) -> None:
        now = time.monotonic()
        row = request.row
        if request.opened is not None:
            request.opened.abort()  # no effect if it was closed
        request.body = b""
        for spool in request.spools:
            spool.close()
        row.total_ms = (now - request.arrived) * 1000
        if request.first_at:
            row.stream_ms = (now - request.first_at) * 1000
        if request.key is None:  # no known key: counted, but no row, or any client could fill the ledger
            self._parts.metrics.refused(row.status)
            return
        self._booking.attempts.end(request)
        # A long answer always takes several steps: a single step would block the event loop.
        has_room = len(self._late) < MAX_LATE or self._booking.estimates.is_long(request)
        if self._booking.is_late(request) and has_room:
            task = asyncio.get_running_loop().create_task(self._finish_late(request))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        else:
            self._booking.settle_now(request)
            self._end(request)

    async def drained(self) -> None:
        """Wait until the ledger has every row."""
        while self._late:
            await asyncio.wait(set(self._late))
        self._booking.refusals.flush()

    async def _finish_late(self, request: RequestState) -> None:
        try:
            await self._booking.settle(request)
        finally:
            self._end(request)

    def _end(self, request: RequestState) -> None:
        row = request.row
        try:
            self._booking.close(request)
        except Exception as error:
            log.error(
                "a request could not be booked",
                extra={"request_id": request.id, "kind": type(error).__name__},
            )
        if request.reservation is not None:
            tokens = limit_tokens(row) + request.tokens_before
            self._parts.limiter.settle(request.reservation, tokens, row.cost_pusd + request.pusd_before)
        if request.held is not None:  # not earlier: its fields are in memory until here
            request.held.release()
