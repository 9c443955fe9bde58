"""Cascading: asks the cheap model first; sends its answer if it was confident, else asks the strong model.

Both are separate upstream requests, so both have a row: the rejected cheap answer under the request's id, the
strong one's under that id with the suffix `.strong`.
"""

from __future__ import annotations

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.errors import ClientGone, UpstreamFailed
from ridgeline.gateway.pipeline.booking import Booking
from ridgeline.gateway.pipeline.forwarding import Forwarding, Whole
from ridgeline.gateway.pipeline.job import Job
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import RequestState, Send
from ridgeline.gateway.pipeline.usage_estimates import limit_tokens
from ridgeline.gateway.routing.cascade import ask_for_logprobs, strip_logprobs


class Cascading:
    def __init__(self, parts: Parts, forwarding: Forwarding, booking: Booking) -> None:
        self._parts, self._forwarding, self._booking = parts, forwarding, booking

    async def forward(self, request: RequestState, job: Job, send: Send) -> None:
        decision = job.decision
        assert decision is not None
        assert decision.cascade is not None
        kind, own = request.place.endpoint.kind, request.fields
        asked = dict(own)
        is_asked = ask_for_logprobs(kind, asked)
        if is_asked:
            request.fields = asked
        confidence: float | None = None
        try:
            await self._forwarding.open(request, job)
            whole = await self._forwarding.whole(request, job)
        except UpstreamFailed as error:
            if request.opened is not None:
                request.opened.abort()  # an interrupted answer still holds its slot
            request.end_as("upstream_failed", error.status, error.code)
        else:
            if whole.status < 400:
                confidence = decision.cascade.confidence(whole.body)
                decision.why["confidence"] = None if confidence is None else round(confidence, 4)
            if whole.status < 400 and decision.cascade.accept(whole.body):
                body = strip_logprobs(whole.body) if is_asked else whole.body
                await self._forwarding.deliver(request, job, Whole(whole.status, whole.headers, body), send)
                return
            request.end_as("ok" if whole.status < 400 else "refused", whole.status, "escalated")
        if request.gone:
            raise ClientGone
        await self._booking.settle(request)
        if is_asked:
            request.fields = own
        self._escalate(request, job, confidence)
        await self._forwarding.forward(request, job, send)

    def _escalate(self, request: RequestState, job: Job, confidence: float | None) -> None:
        parts, decision = self._parts, job.decision
        assert decision is not None
        assert job.routing_request is not None
        assert parts.router is not None
        parts.router.escalated(job.routing_request, decision, confidence)
        before = self._booking.close(request)
        request.tokens_before += limit_tokens(before)
        request.pusd_before += before.cost_pusd
        job.model = parts.catalog.find(decision.escalate_to)
        row = LedgerRow(f"{before.request_id}.strong", before.at_ms)
        for name in ("key_id", "team_id", "endpoint", "model_asked", "stream", "guard"):
            setattr(row, name, getattr(before, name))
        row.model = job.model.name
        request.row, request.usage, request.opened, request.late_usage = row, None, None, False
        request.answer, request.input_estimate, request.texts = None, None, []
        request.first_at = request.read_on_s = 0.0
