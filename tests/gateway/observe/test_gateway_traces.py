"""The gateway's spans, and that an engine's own are parts of the same trace."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.gateway.observe.trace import Trace
from ridgeline.gateway.observe.traces import Tracer
from ridgeline.telemetry.traces import read_traceparent
from tests.conftest import STOP_TIMEOUT_S, await_ready, start_server
from tests.gateway.observe.collector import Collector
from tests.gateway.stage import staged
from tests.patience import PATIENCE_S

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    collector.spans.clear()
    made = Tracer(ObserveConfig(otlp_endpoint=collector.url, trace_sample=0.0), {"local": "ridgeline"})
    yield made
    made.close()


def row(**fields: Any) -> LedgerRow:
    return LedgerRow("req_1", 1, endpoint="chat", model="small", status=200, total_ms=100.0, **fields)


def begun(tracer: Tracer, header: str) -> Trace:
    trace = tracer.begin(header.encode())
    assert trace is not None
    return trace


def test_a_clients_trace_goes_on_and_its_decision_holds(tracer: Tracer) -> None:
    sampled = begun(tracer, f"00-{TRACE}-{SPAN}-01")
    sent = read_traceparent(sampled.traceparent("local"))
    assert sent is not None
    assert (sent.trace_id, sent.sampled) == (TRACE, True)
    assert sent.span_id not in (SPAN, sampled.context.span_id)  # the attempt's own
    unsampled = begun(tracer, f"00-{TRACE}-{SPAN}-00")
    assert unsampled.traceparent("local") == f"00-{TRACE}-{SPAN}-00".encode()
    assert unsampled.id == ""


def test_without_a_good_header_the_share_decides(collector: Collector, tracer: Tracer) -> None:
    assert tracer.begin(None) is None
    assert tracer.begin(b"00-broken") is None
    always = Tracer(ObserveConfig(otlp_endpoint=collector.url, trace_sample=1.0, trust_traceparent=False))
    trace = always.begin(f"00-{TRACE}-{SPAN}-00".encode())
    assert trace is not None
    assert trace.context.trace_id != TRACE
    assert trace.parent_id == ""
    always.close()


def test_a_request_is_a_span_with_its_queue_upstream_and_stream_below(tracer: Tracer) -> None:
    trace = begun(tracer, f"00-{TRACE}-{SPAN}-01")
    trace.traceparent("local")
    told = row(upstream="local", upstream_model="m", gateway_ms=1.0, queue_ms=9.0, ttft_ms=40.0, stream=True)
    told.tokens_in, told.tokens_out, told.usage_source = 12, 5, "reported"
    spans = {span.name: span for span in tracer.spans(trace, told, 50.0, asked_at=50.01, first_at=50.05)}
    request, upstream = spans["chat small"], spans["gateway.upstream"]
    assert (request.parent_id, request.start, request.end) == (SPAN, 50.0, 50.1)
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.model"] == "small"
    assert request.attributes["gen_ai.response.model"] == "m"
    assert request.attributes["gen_ai.usage.input_tokens"] == 12
    assert request.attributes["gen_ai.provider.name"] == "ridgeline"
    assert (spans["gateway.queue"].start, spans["gateway.queue"].end) == pytest.approx((50.001, 50.01))
    assert (upstream.start, upstream.end, upstream.kind) == (50.01, 50.1, "client")
    assert spans["gateway.stream"].parent_id == upstream.span_id
    assert {spans["gateway.queue"].parent_id, upstream.parent_id} == {request.span_id}
    assert request.error == ""


def test_every_upstream_that_was_asked_has_its_span_and_the_failed_ones_say_so(tracer: Tracer) -> None:
    trace = begun(tracer, f"00-{TRACE}-{SPAN}-01")
    ids = [read_traceparent(trace.traceparent(name)) for name in ("far", "local", "hedge")]
    asked_at = time.monotonic()
    spans = tracer.spans(trace, row(upstream="local", attempts=3), asked_at - 1, asked_at, None)
    attempts = [span for span in spans if span.name == "gateway.upstream"]
    assert [span.span_id for span in attempts] == [one.span_id for one in ids if one is not None]
    assert [span.error for span in attempts] == ["upstream_failed", "", "upstream_failed"]
    assert [span.attributes["ridgeline.upstream"] for span in attempts] == ["far", "local", "hedge"]


def test_a_request_that_reached_no_upstream_is_one_failed_span(tracer: Tracer) -> None:
    trace = begun(tracer, f"00-{TRACE}-{SPAN}-01")
    limited = row(outcome="limited", error_code="rate_limit_exceeded")
    [span] = tracer.spans(trace, limited, 1.0, None, None)
    assert span.error == "rate_limit_exceeded"


@pytest.fixture(scope="module")
def traced_server(
    collector: Collector, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    server = start_server(tmp_path_factory.mktemp("traced") / "log", "--otlp-endpoint", collector.url)
    try:
        await_ready(server)
        yield server.base_url
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, server.log.read_text()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def ask(url: str, traceparent: bytes) -> None:
    body = {
        "model": "smollm2-135m",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "a secret word"}],
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": traceparent.decode()},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_gateway_and_engine_are_one_trace_with_right_parents_and_sane_times(
    tmp_path: Path, collector: Collector, traced_server: str, stream: bool
) -> None:
    collector.spans.clear()
    values = {
        "upstreams": [{"name": "local", "kind": "ridgeline", "url": traced_server}],
        "models": [{"name": "small", "targets": ("local/smollm2-135m",)}],
        "observe": {"otlp_endpoint": collector.url, "trace_sample": 0.0, "access_log": str(tmp_path / "log")},
    }
    body = {"model": "small", "max_tokens": 8, "ignore_eos": True, "stream": stream}
    body["messages"] = [{"role": "user", "content": "a secret word"}]
    began_ns = time.time_ns()
    async with staged(tmp_path, values) as stage:
        answer = await stage.http.post(
            "/v1/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}
        )
        assert answer.status_code == 200
        request_id = answer.headers["x-request-id"]
    ended_ns = time.time_ns()
    names = (
        "chat small",
        "gateway.upstream",
        "server.request",
        "engine.queue",
        "engine.prefill",
        "engine.decode",
    )
    await asyncio.to_thread(collector.until, lambda: set(names) <= {span.name for span in collector.spans})

    assert {span.trace_id for span in collector.spans} == {TRACE}
    gateway, upstream, server, queue, prefill, decode = map(collector.named, names)
    assert gateway.parent_id == SPAN
    assert upstream.parent_id == gateway.span_id
    assert server.parent_id == upstream.span_id
    assert {queue.parent_id, prefill.parent_id, decode.parent_id} == {server.span_id}
    assert (gateway.service, server.service) == ("ridgeline-gateway", "ridgeline-server")
    assert server.attributes["gen_ai.usage.output_tokens"] == 8
    assert gateway.attributes["gen_ai.usage.output_tokens"] == 8
    assert (
        gateway.attributes["ridgeline.request_id"] == server.attributes["ridgeline.request_id"] == request_id
    )
    slack_ns = 20_000_000  # two processes turned their own clocks into times of day
    assert gateway.start_ns <= upstream.start_ns <= server.start_ns + slack_ns
    assert (
        server.start_ns <= queue.start_ns <= queue.end_ns <= prefill.end_ns <= decode.end_ns <= server.end_ns
    )
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert server.end_ns <= upstream.end_ns + slack_ns
    assert began_ns - slack_ns <= gateway.start_ns < gateway.end_ns <= ended_ns + slack_ns
    assert not any(b"secret word" in sent for sent in collector.bodies)
    assert TRACE in (tmp_path / "log").read_text()


def test_a_server_makes_no_spans_for_who_did_not_ask(
    tracer: Tracer, collector: Collector, traced_server: str
) -> None:
    for header in (f"00-{TRACE}-{SPAN}-00", "00-broken", f"00-{TRACE}-{SPAN}-01"):
        ask(traced_server, header.encode())
    collector.until(lambda: len(collector.spans) >= 4)
    assert len([span for span in collector.spans if span.name == "server.request"]) == 1
