"""Booking: writes a request's usage and cost into its row, and passes the row to ledger, log and metrics."""

from __future__ import annotations

import logging

import msgspec

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import write_fields
from ridgeline.gateway.pipeline.attempt_booking import AttemptBooking
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.refusals import Refusals
from ridgeline.gateway.pipeline.request_state import RequestState
from ridgeline.gateway.pipeline.usage_estimates import UsageEstimates

log = logging.getLogger("ridgeline.gateway")

_NOTHING = Usage()


class Booking:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ours = {one.name for one in parts.settings.upstreams if one.is_ours}
        self.estimates = UsageEstimates(parts)
        self.attempts = AttemptBooking(parts, self.estimates)
        self.refusals = Refusals(self._write_refused)

    def is_late(self, request: RequestState) -> bool:
        """Whether its usage must still be requested, or counted by a tokenizer or in many steps."""
        return self._is_known_upstream(request) or self.estimates.is_slow(request)

    async def settle(self, request: RequestState) -> None:
        """The final usage: from a ridgeline server, else estimated."""
        self.attempts.end(request)
        request.usage = await self._late_usage(request)
        if self.estimates.is_due(request):
            try:
                await self.estimates.fill(request)
            except Exception as error:  # of a tokenizer: use the formula
                extra = {"request_id": request.id, "kind": type(error).__name__}
                log.error("a tokenizer could not count a request's usage", extra=extra)
                await self.estimates.fill_by_formula(request)

    def settle_now(self, request: RequestState) -> None:
        """The same without waiting."""
        if self.estimates.is_due(request):
            self.estimates.fill_now(request)

    def _is_known_upstream(self, request: RequestState) -> bool:
        """Whether it was interrupted at a ridgeline server, which knows its usage."""
        return request.late_usage and request.row.upstream in self._ours

    async def _late_usage(self, request: RequestState) -> Usage | None:
        """The upstream's usage of an interrupted request; else the usage seen here."""
        row = request.row
        if not self._is_known_upstream(request):
            return request.usage
        try:
            told = await self._parts.upstreams.usage_of(row.upstream, row.request_id, row.at_ms)
            return told or request.usage
        except Exception as error:
            log.warning(
                "could not ask an upstream for a request's usage",
                extra={"request_id": row.request_id, "upstream": row.upstream, "cause": str(error)},
            )
            return request.usage

    def close(self, request: RequestState) -> LedgerRow:
        parts, row, usage = self._parts, request.row, request.usage or _NOTHING
        row.tokens_in, row.tokens_cached = usage.tokens_in, usage.tokens_cached
        row.tokens_cache_write, row.tokens_out = usage.tokens_cache_write, usage.tokens_out
        row.tokens_reasoning, row.usage_source = usage.tokens_reasoning, usage.source
        row.audio_ms, row.characters = usage.audio_ms, usage.characters
        if row.upstream and usage.source != "none":
            row.cost_pusd, row.price_source = parts.prices.cost(
                row.model, row.upstream, row.upstream_model, usage
            )
        for attempt in request.attempts[1:]:
            parts.metrics.attempt(attempt.kind, attempt.upstream, attempt.cause)
        if request.why or row.attempts > 1:
            row.route = msgspec.json.encode({**request.why, **_attempts(request)}).decode()
        parts.metrics.observe(row)
        if not self.refusals.takes(row):
            self._write(request)
        if parts.tracer is not None and request.trace is not None:
            parts.tracer.finish(request)
        return row

    def _write(self, request: RequestState) -> None:
        parts, row = self._parts, request.row
        trace_id = request.trace.id if request.trace is not None else ""
        parts.ledger.close(row)
        if parts.access_log.wants_bodies and request.fields:
            parts.access_log.write(row, trace_id, write_fields(request.fields))  # after the guard
        else:
            parts.access_log.write(row, trace_id)

    def _write_refused(self, row: LedgerRow) -> None:
        self._parts.ledger.close(row)
        self._parts.access_log.write(row)


def _attempts(request: RequestState) -> dict[str, object]:
    """For a request with several attempts: the upstreams and outcomes."""
    if len(request.attempts) < 2:
        return {}
    tried = [
        {"kind": one.kind, "upstream": one.upstream, "result": one.cause or one.status}
        for one in request.attempts
    ]
    return {"attempts": tried}
