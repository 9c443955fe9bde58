"""Tracing: selects the requests to trace, and exports their spans when they have ended. Off without
--otlp-endpoint.

The gate asks for a request's trace context; the code that books its end passes its TimingRecords.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ridgeline.server.config import ServerConfig
from ridgeline.server.http.request_context import RequestContext
from ridgeline.telemetry.timing import TimingRecord
from ridgeline.telemetry.traces import SpanExport, TraceContext, new_trace_id, read_traceparent, server_spans

# The operation of any other path is the path itself.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    def __init__(self, config: ServerConfig) -> None:
        assert config.otlp_endpoint is not None
        self._share = config.trace_sample
        self._export = SpanExport(config.otlp_endpoint, "ridgeline-server")

    def context(self, traceparent: str | None) -> TraceContext | None:
        """None: this request is not traced."""
        if traceparent is not None:
            given = read_traceparent(traceparent.encode("latin-1"))
            if given is not None:
                return given if given.sampled else None
        if self._share and random.random() < self._share:
            return TraceContext(new_trace_id(), "", True)
        return None

    def book(
        self,
        context: RequestContext,
        timings: Sequence[TimingRecord],
        model: str,
        status: int,
        failure: str,
        with_engine: bool = True,
    ) -> None:
        """A request has ended. `timings`: one per choice, at least one."""
        if context.trace is None:
            return
        attributes: dict[str, str | bool | int | float] = {
            "gen_ai.operation.name": _OPERATIONS.get(context.path, context.path),
            "gen_ai.provider.name": "ridgeline",
            "gen_ai.request.model": model,
            "http.response.status_code": status,
            "ridgeline.request_id": context.request_id,
        }
        self._export.offer(server_spans(context.trace, timings, attributes, failure, with_engine))

    def close(self) -> None:
        self._export.close()
