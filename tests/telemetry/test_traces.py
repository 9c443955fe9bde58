"""W3C trace context, and spans on their way out: bounded, dropped rather than waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.telemetry import traces
from ridgeline.telemetry.clock import wall_offset_ns
from ridgeline.telemetry.timing import TimingRecord
from ridgeline.telemetry.traces import (
    Span,
    SpanExport,
    TraceContext,
    new_trace_id,
    read_traceparent,
    server_spans,
)
from tests.gateway.observe.collector import Collector
from tests.patience import PATIENCE_S

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def test_a_traceparent_is_read_and_written_the_same() -> None:
    header = f"00-{TRACE}-{SPAN}-01".encode()
    assert read_traceparent(header) == TraceContext(TRACE, SPAN, True)
    assert TraceContext(TRACE, SPAN, True).traceparent() == header
    assert read_traceparent(f"00-{TRACE}-{SPAN}-00".encode()) == TraceContext(TRACE, SPAN, False)
    assert read_traceparent(f"00-{TRACE}-{SPAN}-03".encode()) == TraceContext(TRACE, SPAN, True)
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-01-of a later version".encode()) is not None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
    ],
)
def test_a_broken_traceparent_is_as_good_as_none(header: str) -> None:
    assert read_traceparent(header.encode()) is None


@given(st.binary(max_size=80))
def test_no_bytes_upset_the_reader(header: bytes) -> None:
    read_traceparent(header)


def test_a_servers_spans_are_the_moments_of_its_timing_record() -> None:
    timing = TimingRecord(
        10.0, admitted=10.5, token_times=[11.0, 11.2, 11.9], end=12.0, sent=12.1, prompt_tokens=7
    )
    spans = {s.name: s for s in server_spans(TraceContext(TRACE, SPAN, True), [timing], {"a": 1}, "")}
    request = spans["server.request"]
    assert (request.parent_id, request.start, request.end) == (SPAN, 10.0, 12.1)
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    found = {name: (span.start, span.end) for name, span in spans.items() if name != "server.request"}
    assert found == {
        "engine.queue": (10.0, 10.5),
        "engine.prefill": (10.5, 11.0),
        "engine.decode": (11.0, 11.9),
    }
    assert {spans[name].parent_id for name in found} == {request.span_id}
    assert {span.trace_id for span in spans.values()} == {TRACE}


def test_a_request_that_ended_in_the_queue_was_only_queued() -> None:
    timing = TimingRecord(10.0, end=11.0)
    spans = server_spans(TraceContext(TRACE, SPAN, True), [timing], {}, "abort")
    assert [(s.name, s.end) for s in spans] == [("server.request", 11.0), ("engine.queue", 11.0)]
    assert spans[0].error == "abort"


def test_spans_arrive_with_their_times_parents_and_errors(collector: Collector) -> None:
    export = SpanExport(collector.url, "test", batch_s=0.01)
    now = time.monotonic()
    parent = Span("outer", new_trace_id(), "", now - 2, now - 1, "server", {"n": 3, "s": "x"}, "timeout")
    export.offer([parent, parent.child("inner", now - 1.75, now - 1.5)])
    collector.until(lambda: len(collector.spans) == 2)
    export.close()
    outer, inner = collector.named("outer"), collector.named("inner")
    assert outer.service == "test"
    assert (outer.parent_id, outer.kind) == ("", 2)
    assert outer.is_error
    assert outer.attributes == {"n": 3, "s": "x", "error.type": "timeout"}
    assert abs(outer.start_ns - ((now - 2) * 1e9 + wall_offset_ns())) < 50_000_000
    assert inner.start_ns - outer.start_ns == pytest.approx(0.25e9, abs=1e4)
    assert inner.end_ns - inner.start_ns == pytest.approx(0.25e9, abs=1e4)
    assert (inner.trace_id, inner.parent_id) == (outer.trace_id, outer.span_id)
    assert not inner.is_error
    assert export.dropped == 0


def test_close_sends_what_waits(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LAST_EXPORT_S", PATIENCE_S)
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT_S", PATIENCE_S)
    export = SpanExport(collector.url + "/v1/traces", "test", batch_s=0.0)
    for _ in range(700):
        export.offer([Span("s", new_trace_id(), "", 1.0, 2.0)])
    export.close()
    assert len(collector.spans) == 700
    assert export.sent == 700
    export.offer([])
    assert export.dropped == 1  # after the end no thread sends it


def test_spans_that_cannot_be_sent_are_dropped_and_counted_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "LAST_EXPORT_S", 0.1)
    refusing = Collector(status=400)
    export = SpanExport(refusing.url, "test", max_waiting=100, batch_s=1.0)
    for _ in range(1000):
        export.offer([Span("s", new_trace_id(), "", 1.0, 2.0)])
    assert export.dropped >= 800  # while the first wait to be sent together, at most 100 wait with them
    refusing.until(lambda: export.dropped == 1000)
    export.close()
    refusing.close()
