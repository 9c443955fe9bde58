"""Trace: one request's place in a trace, and the spans of the upstreams it asks. `traces.Tracer` sends it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ridgeline.telemetry.traces import TraceContext, new_span_id

MAX_ATTEMPTS = 16  # upstreams of a request that have a span


@dataclass(slots=True)
class UpstreamSpan:
    """One upstream request."""

    upstream: str
    span_id: str
    start: float


class Trace:
    """One request's position in a trace."""

    __slots__ = ("attempts", "context", "parent_id")

    def __init__(self, trace_id: str, parent_id: str, sampled: bool) -> None:
        self.context = TraceContext(trace_id, new_span_id() if sampled else parent_id, sampled)
        self.parent_id = parent_id
        self.attempts: list[UpstreamSpan] = []

    def traceparent(self, upstream: str = "") -> bytes:
        """The header for one more upstream request. If not sampled, the client's own header is passed on."""
        if not self.context.sampled or len(self.attempts) >= MAX_ATTEMPTS:
            return self.context.traceparent()
        self.attempts.append(UpstreamSpan(upstream, new_span_id(), time.monotonic()))
        return TraceContext(self.context.trace_id, self.attempts[-1].span_id, True).traceparent()

    @property
    def id(self) -> str:
        """For the access log."""
        return self.context.trace_id if self.context.sampled else ""
