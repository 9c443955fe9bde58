"""AttemptBooking: writes every attempt that an upstream may bill ahead, and books it in a row.

The row of a request books the attempt that answered, or the last one. Earlier attempts and hedges that a
hosted upstream may have computed have separate rows: the request's id, a dot and their number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.token_formula import unseen_tokens
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Begun, RequestState
from ridgeline.gateway.pipeline.usage_estimates import UsageEstimates, limit_tokens
from ridgeline.gateway.upstreams.attempts import REFUSED_KEY, UNSENT
from ridgeline.gateway.upstreams.opened import Attempt
from ridgeline.gateway.upstreams.outgoing import Target

COPIED = ("at_ms", "key_id", "team_id", "endpoint", "model_asked", "model", "stream")


class AttemptBooking:
    def __init__(self, parts: Parts, estimates: UsageEstimates) -> None:
        self._parts, self._estimates = parts, estimates
        self._hosted = {one.name for one in parts.settings.upstreams if not one.is_ours}
        self._read_on_s = {one.name: one.reads_on_s for one in parts.settings.upstreams}

    def begin(self, request: RequestState, target: Target) -> int:
        """Write the next attempt ahead; returns its number. Unavailable if the ledger is full."""
        row, begun = request.row, request.begun
        noted = _noted(request)
        self._book(request, [one for one in begun if one.number in noted], noted)
        is_taken = any(one.id == row.request_id and one.number not in noted for one in begun)
        number = len(begun) + 1
        bound = self._estimates.output_bound(request)
        used = self._estimates.input(request, row.model, target)
        opening = Opening(
            f"{row.request_id}.{number}" if is_taken else row.request_id,
            row.at_ms,
            row.key_id,
            row.team_id,
            row.endpoint,
            row.model_asked,
            row.model,
            target.upstream,
            target.model,
            row.stream,
            used.tokens_in,
            bound.answers,
            bound.limit,
            used.audio_ms,
            used.characters,
        )
        self._parts.ledger.open(opening)
        request.asked_at = time.monotonic()
        begun.append(Begun(opening.request_id, number, target, request.asked_at))
        request.late_usage = True  # until it ends only the upstream knows its usage
        request.read_on_s = self._read_on_s[target.upstream]
        return number

    def end(self, request: RequestState) -> None:
        """The request has ended: book the attempts that its own row does not."""
        if not request.begun:
            return
        noted = _noted(request)
        answered = [one for one in request.begun if one.number in noted and not noted[one.number].cause]
        own = answered[-1] if request.opened is not None and answered else request.begun[-1]
        if request.opened is None and not _may_be_billed(noted.get(own.number)):
            # A ridgeline server reports the usage of a failure; a hosted one does not bill it. A server that
            # refused every key computed nothing, and would refuse a question about the usage too.
            is_refused = all(one.status in REFUSED_KEY for one in noted.values())
            request.late_usage &= own.target.upstream not in self._hosted and not is_refused
        own.is_booked = True
        self._book(request, request.begun, noted, free=own.id)
        self._close_others(request)
        request.begun = []

    def _book(
        self, request: RequestState, some: Iterable[Begun], noted: dict[int, Attempt], free: str = ""
    ) -> None:
        """Rows of attempts that may be billed. free: the opening of the attempt of the request's own row."""
        main = request.row.request_id
        for one in some:
            attempt = noted.get(one.number)
            if one.is_booked or one.target.upstream not in self._hosted or not _may_be_billed(attempt):
                continue
            one.is_booked = True
            # A hedge that won leaves its opening to the attempt whose opening the request's own row closes.
            id = one.id if one.id != main else free if free not in ("", main) else f"{main}.{one.number}"
            seconds = time.monotonic() - one.at if attempt is None else attempt.took_s
            bound = self._estimates.output_bound(request)
            usage = self._estimates.input(request, request.row.model, one.target)
            usage.tokens_out += unseen_tokens(seconds, bound.limit, bound.answers)
            usage.source = "estimated"
            self._close(request, id, one.target, usage, attempt.cause if attempt else "hedged", seconds)

    def _close_others(self, request: RequestState) -> None:
        """Openings that no row has closed: a restart would book them as lost."""
        ids = {one.id: one for one in request.begun if one.id != request.row.request_id}
        for id, one in ids.items():
            if id not in request.closed:
                self._close(request, id, one.target, Usage(), "not_billed", 0.0)

    def _close(
        self, request: RequestState, id: str, target: Target, usage: Usage, cause: str, seconds: float
    ) -> None:
        parts, main = self._parts, request.row
        row = LedgerRow(id, main.at_ms, **{name: getattr(main, name) for name in COPIED[1:]})
        row.upstream, row.upstream_model = target.upstream, target.model
        row.outcome, row.error_code, row.attempts = "upstream_failed", cause, 1
        row.total_ms = seconds * 1000
        row.tokens_in, row.tokens_out, row.usage_source = usage.tokens_in, usage.tokens_out, usage.source
        row.audio_ms, row.characters = usage.audio_ms, usage.characters
        if usage.source != "none":
            row.cost_pusd, row.price_source = parts.prices.cost(
                row.model, row.upstream, row.upstream_model, usage
            )
        request.closed.add(id)
        request.tokens_before += limit_tokens(row)
        request.pusd_before += row.cost_pusd
        parts.ledger.close(row)
        parts.metrics.spent(row)


def _noted(request: RequestState) -> dict[int, Attempt]:
    """Outcomes of ended attempts, by number."""
    return {one.number: one for one in request.attempts if one.number}


def _may_be_billed(attempt: Attempt | None) -> bool:
    """None: still running. An error status, or a request that was not sent, is not billed."""
    return attempt is None or (attempt.status == 0 and attempt.cause not in UNSENT)
