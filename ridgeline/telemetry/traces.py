"""Traces: W3C trace context in and out; spans are created at a request's end from timestamps that exist
anyway.

Shared by the gateway and the server. A request that is not sampled costs one header lookup. Spans are sent by
OTLP over HTTP from a separate thread; when it falls behind, they are dropped and counted. A span holds
numbers and names, never a request's text.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.options import OptionError
from ridgeline.telemetry.clock import wall_offset_ns
from ridgeline.telemetry.timing import TimingRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("ridgeline.traces")

Kind = Literal["server", "client", "internal"]
Attributes = dict[str, str | bool | int | float]

PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
BATCH = 512  # spans in one export
MAX_CHOICES = 16  # choices of one request that get their own spans
LAST_EXPORT_S = 3.0  # time limit for pending spans when the process ends

_TRACEPARENT = re.compile(
    rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", flags=re.DOTALL
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The parent of a request's spans. Ids in hexadecimal, as in the header."""

    trace_id: str
    span_id: str
    sampled: bool

    def traceparent(self) -> bytes:
        return b"00-%b-%b-%b" % (
            self.trace_id.encode(),
            self.span_id.encode(),
            b"01" if self.sampled else b"00",
        )


def read_traceparent(header: bytes) -> TraceContext | None:
    """None for anything invalid by the W3C recommendation: a broken header is treated as missing."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # Version 00 ends here; later ones may continue after another dash; ff is invalid.
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if trace_id == b"0" * 32 or span_id == b"0" * 16:
        return None
    return TraceContext(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1))


def new_trace_id() -> str:
    return _nonzero(16)


def new_span_id() -> str:
    return _nonzero(8)


def _nonzero(size: int) -> str:
    made = secrets.token_hex(size)
    return made if int(made, 16) else _nonzero(size)


@dataclass(slots=True)
class Span:
    """One part of a request. Times are `time.monotonic()` seconds of this machine."""

    name: str
    trace_id: str
    parent_id: str  # empty: the root of a trace
    start: float
    end: float
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # a short error type, no message
    span_id: str = field(default_factory=new_span_id)

    def child(self, name: str, start: float, end: float, kind: Kind = "internal") -> Span:
        return Span(name, self.trace_id, self.span_id, start, end, kind)


class SpanExport:
    """Accepts finished spans from any thread and sends them from its own."""

    def __init__(self, endpoint: str, service: str, max_waiting: int = 2048, batch_s: float = 1.0) -> None:
        """endpoint: a collector's base URL; headers come from OTEL_EXPORTER_OTLP_HEADERS."""
        self.dropped = 0  # requests whose spans were lost: the queue was full, or the collector rejected them
        self.sent = 0
        self._max_waiting = max_waiting
        self._batch_s = batch_s
        self._waiting: deque[list[Span]] = deque()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._is_taken = True
        require_exporter()
        self._encoder = _Encoder(service)
        self._exporter = _exporter(_traces_url(endpoint))
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)
        self._thread.start()

    def offer(self, spans: list[Span]) -> None:
        """Add all spans of one request. Never blocks."""
        if len(self._waiting) >= self._max_waiting or self._closed.is_set():
            self.dropped += 1
            return
        self._waiting.append(spans)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send the pending spans, if the collector accepts them soon."""
        if not self._closed.is_set():
            self._closed.set()
            self._wake.set()
            self._thread.join(timeout=LAST_EXPORT_S)
            self._exporter.shutdown()

    def _send_all(self) -> None:
        last = False
        while not last:
            self._wake.wait()
            self._closed.wait(self._batch_s)
            self._wake.clear()
            last = self._closed.is_set()  # read after clearing: a later close wakes it again
            while self._waiting:
                self._send_batch()

    def _send_batch(self) -> None:
        requests = 0
        spans: list[Span] = []
        while self._waiting and len(spans) < BATCH:
            spans += self._waiting.popleft()
            requests += 1
        clock_ns = wall_offset_ns()
        try:
            readable = [self._encoder.readable(span, clock_ns) for span in spans]
            taken = self._exporter.export(readable).name == "SUCCESS"
        except Exception:  # the thread must survive any error
            taken = False
        if taken:
            self.sent += len(spans)
        else:
            self.dropped += requests
        if taken != self._is_taken:  # logged once, not with every batch
            self._is_taken = taken
            log.log(
                logging.INFO if taken else logging.WARNING,
                "the OTLP endpoint accepts traces again"
                if taken
                else "the OTLP endpoint does not accept traces; dropping them",
            )


class _Encoder:
    """Our spans as spans of opentelemetry-sdk, whose exporter has the wire format."""

    def __init__(self, service: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource.create({"service.name": service})
        self._scope = InstrumentationScope("ridgeline")

    def readable(self, span: Span, clock_ns: int) -> ReadableSpan:
        """clock_ns: offset from monotonic to wall-clock time; one for all spans that must fit together."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        trace_id = int(span.trace_id, 16)
        parent = SpanContext(trace_id, int(span.parent_id, 16), True, flags) if span.parent_id else None
        attributes = span.attributes | ({"error.type": span.error} if span.error else {})
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, int(span.span_id, 16), False, flags),
            parent,
            self._resource,
            attributes,
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.start * 1e9) + clock_ns,
            end_time=int(max(span.end, span.start) * 1e9) + clock_ns,
            instrumentation_scope=self._scope,
        )


def _traces_url(endpoint: str) -> str:
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(PATH) else endpoint + PATH


def require_exporter() -> None:
    """Raises OptionError if the packages that send traces are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise OptionError(
            f"otlp_endpoint needs the package {error.name}, which is not installed: "
            "pip install 'ridgeline[otel]', or remove the option"
        ) from error


def _exporter(url: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # It would log the endpoint's full URL and a traceback for every rejected batch.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


# ---- the server's part ----


def server_spans(
    parent: TraceContext,
    timings: Sequence[TimingRecord],
    attributes: Attributes,
    error: str,
    with_engine: bool = True,
) -> list[Span]:
    """One request at a server: server.request, below it engine.queue, .prefill, .decode of each choice.

    with_engine: whether the timings include the engine's part; an encoder's do not.
    """
    start = min(timing.arrival for timing in timings)
    end = max(_end(timing) for timing in timings)
    request = Span("server.request", parent.trace_id, parent.span_id, start, end, "server", error=error)
    request.attributes = {
        **attributes,
        "gen_ai.usage.input_tokens": sum(timing.prompt_tokens for timing in timings),
        "gen_ai.usage.output_tokens": sum(timing.output_tokens for timing in timings),
        "gen_ai.usage.cache_read.input_tokens": sum(timing.cached_tokens for timing in timings),
    }
    spans = [request]
    for timing in timings[: MAX_CHOICES if with_engine else 0]:
        spans += _engine_spans(request, timing)
    return spans


def _engine_spans(request: Span, timing: TimingRecord) -> list[Span]:
    if timing.admitted is None:
        return [request.child("engine.queue", timing.arrival, _end(timing))]
    first = timing.first_token
    prefill = request.child("engine.prefill", timing.admitted, _end(timing) if first is None else first)
    prefill.attributes = {
        "ridgeline.prompt_tokens": timing.prompt_tokens,
        "ridgeline.cached_tokens": timing.cached_tokens,
        "ridgeline.preemptions": timing.preemptions,
    }
    spans = [request.child("engine.queue", timing.arrival, timing.admitted), prefill]
    if first is not None:
        decode = request.child("engine.decode", first, timing.token_times[-1])
        decode.attributes = {"ridgeline.output_tokens": timing.output_tokens}
        spans.append(decode)
    return spans


def _end(timing: TimingRecord) -> float:
    return timing.sent or timing.end or timing.arrival
