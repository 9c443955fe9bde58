"""Tracer: the gateway's spans, by the GenAI semantic conventions, made from a request's row.

The pipeline calls `begin` with the client's header, sends `traceparent()` to each upstream, and calls
`finish` once. A client's trace and sampling decision are continued; other requests are sampled here.
"""

from __future__ import annotations

import random

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.gateway.observe.trace import Trace, UpstreamSpan
from ridgeline.gateway.pipeline.request_state import RequestState
from ridgeline.telemetry.traces import (
    Attributes,
    Span,
    SpanExport,
    new_trace_id,
    read_traceparent,
)

# By the ledger's name of an endpoint; other endpoints keep that name.
OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}


class Tracer:
    def __init__(self, config: ObserveConfig, providers: dict[str, str] | None = None) -> None:
        """providers: the kind of each upstream. OptionError without the extra `otel`."""
        self._config = config
        self._providers = providers or {}
        self._export = SpanExport(config.otlp_endpoint, "ridgeline-gateway", config.trace_queue)

    @property
    def dropped(self) -> int:
        return self._export.dropped

    def begin(self, traceparent: bytes | None) -> Trace | None:
        """None: this request is not traced."""
        if traceparent is not None and self._config.trust_traceparent:
            context = read_traceparent(traceparent)
            if context is not None:
                return Trace(context.trace_id, context.span_id, context.sampled)
        if random.random() >= self._config.trace_sample:
            return None
        return Trace(new_trace_id(), "", True)

    def finish(self, request: RequestState) -> None:
        trace = request.trace
        if trace is None or not trace.context.sampled:
            return
        opened = request.opened
        self._export.offer(
            self.spans(
                trace,
                request.row,
                request.arrived,
                asked_at=opened.asked_at if opened is not None else None,
                first_at=request.first_at or None,
            )
        )

    def close(self) -> None:
        self._export.close()

    def spans(
        self, trace: Trace, row: LedgerRow, arrived: float, asked_at: float | None, first_at: float | None
    ) -> list[Span]:
        """The request's span with children: time in the queue, upstream requests, the answer's stream."""
        end = arrived + row.total_ms / 1e3
        request_span = Span(
            _name(row),
            trace.context.trace_id,
            trace.parent_id,
            arrived,
            end,
            "server",
            self._request_attributes(row),
            _error(row),
            trace.context.span_id,
        )
        spans = [request_span]
        if row.queue_ms is not None and row.gateway_ms is not None:
            queued = arrived + row.gateway_ms / 1e3
            spans.append(request_span.child("gateway.queue", queued, min(queued + row.queue_ms / 1e3, end)))
        answered = _answered(trace, row) if asked_at is not None else None
        for number, attempt in enumerate(trace.attempts):
            if attempt is answered and asked_at is not None:
                spans += self._answered_spans(request_span, attempt, row, asked_at, first_at)
                continue
            later = trace.attempts[number + 1 :]
            span = request_span.child(
                "gateway.upstream", attempt.start, later[0].start if later else end, "client"
            )
            span.span_id, span.error = attempt.span_id, "upstream_failed"
            span.attributes = {"ridgeline.upstream": attempt.upstream}
            spans.append(span)
        return spans

    def _answered_spans(
        self,
        request_span: Span,
        attempt: UpstreamSpan,
        row: LedgerRow,
        asked_at: float,
        first_at: float | None,
    ) -> list[Span]:
        span = request_span.child("gateway.upstream", asked_at, request_span.end, "client")
        span.span_id, span.error = attempt.span_id, request_span.error
        span.attributes = {
            "gen_ai.operation.name": _operation(row),
            "gen_ai.provider.name": self._providers.get(row.upstream, row.upstream),
            "gen_ai.request.model": row.upstream_model,
            "ridgeline.upstream": row.upstream,
            "ridgeline.credential": row.credential,
        }
        if first_at is None:
            return [span]
        stream = span.child("gateway.stream", first_at, request_span.end)
        return [span, stream]

    def _request_attributes(self, row: LedgerRow) -> Attributes:
        found: Attributes = {
            "gen_ai.operation.name": _operation(row),
            "gen_ai.request.model": row.model or row.model_asked[:200],
            "gen_ai.request.stream": row.stream,
            "http.response.status_code": row.status,
            "ridgeline.request_id": row.request_id,
            "ridgeline.outcome": row.outcome,
            "ridgeline.key_id": row.key_id,
        }
        if row.upstream:
            found["gen_ai.provider.name"] = self._providers.get(row.upstream, row.upstream)
            found["gen_ai.response.model"] = row.upstream_model
            found["ridgeline.upstream"] = row.upstream
            found["ridgeline.attempts"] = row.attempts
        if row.usage_source != "none":
            found["gen_ai.usage.input_tokens"] = row.tokens_in
            found["gen_ai.usage.output_tokens"] = row.tokens_out
            found["gen_ai.usage.cache_read.input_tokens"] = row.tokens_cached
            found["gen_ai.usage.cache_creation.input_tokens"] = row.tokens_cache_write
            found["gen_ai.usage.reasoning.output_tokens"] = row.tokens_reasoning
            found["ridgeline.cost_usd"] = row.cost_pusd / 1e12
        if row.ttft_ms is not None and row.stream:
            found["gen_ai.response.time_to_first_chunk"] = row.ttft_ms / 1e3
        if row.cache:
            found["ridgeline.cache"] = row.cache
        if row.similarity is not None:
            found["ridgeline.similarity"] = row.similarity
        return found


def _answered(trace: Trace, row: LedgerRow) -> UpstreamSpan | None:
    """The last attempt at the upstream that answered: hedged attempts may follow it."""
    return next((one for one in reversed(trace.attempts) if one.upstream in (row.upstream, "")), None)


def _operation(row: LedgerRow) -> str:
    return OPERATIONS.get(row.endpoint, row.endpoint)


def _name(row: LedgerRow) -> str:
    return f"{_operation(row)} {row.model}" if row.model else _operation(row)


def _error(row: LedgerRow) -> str:
    return "" if row.outcome in ("ok", "cached") else row.error_code or row.outcome
