"""What the simulator learns from servers: collected steps, the front's times, kept fits, first principles."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.bench.figures.record import RequestRecord, ServerTiming
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.perfmodel.analytic_times import times_from
from ridgeline.lab.perfmodel.front_times import FrontTimes, fit_front
from ridgeline.lab.perfmodel.step_times import StepTimes, Terms, TraceError
from ridgeline.lab.perfmodel.stored import keep_times, kept_times, settings_of, times_file, why_not_kept
from ridgeline.lab.simulate.collect import collect_steps, read_steps
from ridgeline.lab.simulate.measure import PHASES
from ridgeline.telemetry.stats import StepRecord
from ridgeline.telemetry.step_ring import StepRing

TIMES = StepTimes(Terms(0.01, (0.0,), (0.001,)), Terms(0.02, (0.0,), (0.001,)))


def step(number: int) -> StepRecord:
    return StepRecord(number, float(number), 0, 0, 0, 1, 100, 0.01, 0.0, 0.01)


class StepServer:
    """/debug/steps over a ring that holds ten; each poll finds five steps more."""

    def __init__(self) -> None:
        self.ring = StepRing(10)
        self.next_step = 0
        self.failing = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if outer.failing:
                    outer.failing -= 1
                    self.send_error(503)
                    return
                outer.compute(5)
                since = int(parse_qs(urlsplit(self.path).query)["since"][0])
                body = b"".join(json.dumps(asdict(r)).encode() + b"\n" for r in outer.ring.dump(since))
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def compute(self, count: int) -> None:
        for _ in range(count):
            self.ring.append(step(self.next_step))
            self.next_step += 1


@pytest.fixture
def server() -> Iterator[StepServer]:
    made = StepServer()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


async def collected_while(server: StepServer, polls: int) -> tuple[list[int], int]:
    stop = asyncio.Event()
    collecting = asyncio.create_task(collect_steps(server.url, stop, every_s=0.02))
    before = server.next_step
    while server.next_step < before + 5 * polls and not collecting.done():
        await asyncio.sleep(0.005)
    stop.set()
    found = await collecting
    return [record.step_id for record in found.records], found.lost


async def test_polls_are_joined_without_what_came_before(server: StepServer) -> None:
    server.compute(8)
    steps, lost = await collected_while(server, 4)
    assert steps == list(range(13, server.next_step))
    assert lost == 0


async def test_steps_that_the_ring_dropped_are_counted(server: StepServer) -> None:
    stop = asyncio.Event()
    collecting = asyncio.create_task(collect_steps(server.url, stop, every_s=0.02))
    while server.next_step < 10:
        await asyncio.sleep(0.005)
    server.compute(40)
    stop.set()
    assert (await collecting).lost >= 30


async def test_a_poll_that_fails_is_made_up_for(server: StepServer) -> None:
    stop = asyncio.Event()
    collecting = asyncio.create_task(collect_steps(server.url, stop, every_s=0.02))
    while server.next_step < 5:
        await asyncio.sleep(0.005)
    server.failing = 2
    while server.next_step < 20:
        await asyncio.sleep(0.005)
    stop.set()
    found = await collecting
    assert [record.step_id for record in found.records] == list(range(5, server.next_step))


async def test_a_server_without_steps_is_told_apart(server: StepServer) -> None:
    server.failing = 100
    with pytest.raises(LabError, match="with 503"):
        await collect_steps(server.url, asyncio.Event())
    with pytest.raises(LabError, match="is a ridgeline server running"):
        await collect_steps("127.0.0.1:9", asyncio.Event())


def test_files_of_steps_are_read_and_broken_lines_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(asdict(step(number))) + "\n" for number in range(3)))
    assert read_steps(file) == [step(0), step(1), step(2)]
    file.write_text(file.read_text() + "{}\n")
    with pytest.raises(BadInput, match="line 4"):
        read_steps(file)


# ── the front ────────────────────────────────────────────────────────────────────────────────────────────


def answered(tokens: int, queue_ms: float, beyond_ms: float) -> RequestRecord:
    ttft_ms = queue_ms + 50
    first = (ttft_ms + beyond_ms) / 1000
    return RequestRecord(
        0, 0.0, 0.0, first, first, first + 1, first + 1.002, "ok", tokens, 10, n_in=tokens,
        server=ServerTiming(queue_ms=queue_ms, ttft_ms=ttft_ms),
    )  # fmt: skip


def test_the_front_is_what_a_client_sees_beyond_the_server() -> None:
    crowd = [answered(500, 400, 6.0) for _ in range(10)]  # its queue is the engine's, and simulated
    alone = [answered(tokens, 1 + tokens / 1000, 2.0) for tokens in (100, 150, 200, 1000, 1050, 1100)]
    front = fit_front([*crowd, *alone], alone)
    assert front.first_s + front.request_s - 0.001 == pytest.approx(0.006)
    assert front.request_token_s == pytest.approx(1e-6)
    assert front.end_s == pytest.approx(0.002)


def test_a_server_that_tells_nothing_of_itself_gets_no_front() -> None:
    silent = [RequestRecord(0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, "ok", 10, 10) for _ in range(10)]
    assert fit_front(silent) == FrontTimes()


# ── kept fits ────────────────────────────────────────────────────────────────────────────────────────────


def test_kept_times_are_found_for_the_same_model_hardware_and_settings_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    int8 = settings_of(EngineConfig(weights="int8", step_tokens=64))
    assert int8 == {"weights": "int8"}  # a step's size is what the times are a function of
    front = FrontTimes(request_s=0.001)
    keep_times(TIMES, front, "org/model", settings=int8)
    assert kept_times("org/model", settings=int8) == (TIMES, front)
    assert kept_times("org/model") is None
    assert kept_times("org/other", settings=int8) is None
    assert kept_times("org/model", "h200", int8) is None
    times_file("org/model", settings=int8).write_text("{")
    assert kept_times("org/model", settings=int8) is None


def missing_by(error: float) -> StepTimes:
    held_out = TraceError("some of all", 1000, median=error / 2, p90=error, total=-error)
    return msgspec.structs.replace(TIMES, errors=(held_out,))


def test_a_fit_that_misses_what_was_held_out_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert why_not_kept(missing_by(0.07), "m") == ""
    assert why_not_kept(missing_by(0.84), "m") == "its error on held-out traffic is 84%, more than 30%"


def test_a_fit_worse_than_the_one_kept_replaces_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    keep_times(missing_by(0.06), FrontTimes(), "m")
    assert why_not_kept(missing_by(0.08), "m") == ""  # two fits of one quiet machine differ by that
    assert "is 20%, the stored fit's is 6%" in why_not_kept(missing_by(0.2), "m")
    assert "too few steps to hold any out" in why_not_kept(TIMES, "m")
    assert why_not_kept(missing_by(0.2), "another model") == ""


# ── first principles, fitting traffic ────────────────────────────────────────────────────────────────────


def test_a_function_of_work_becomes_step_times() -> None:
    def roofline(work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decode_batch
        return max(0.004, 2e-5 * tokens) + 3e-8 * work.decode_context + 1e-9 * work.prefill_context_product

    times = times_from(roofline)
    assert times.source == "analytic"
    for work in (StepWork(0, 0, 0, 16, 16_000), StepWork(3000, 1, 3000 * 4000, 20, 30_000)):
        assert times.seconds(work) == pytest.approx(roofline(work), rel=0.1)


def test_fitting_traffic_fits_the_context_and_shares_the_time() -> None:
    assert sum(phase.share for phase in PHASES) == pytest.approx(1)
    assert {phase.concurrency for phase in PHASES} >= {1}
    for phase in PHASES:
        requests = phase.traffic(1024, 30.0, seed=1).requests
        assert len(requests) > phase.concurrency
        assert max(request.input_tokens + request.output_tokens for request in requests) <= 1024
