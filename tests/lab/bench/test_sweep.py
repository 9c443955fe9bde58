"""Sweeps: the search for the knee, how points are judged, and that a stopped sweep goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.validity import Validity
from ridgeline.lab.bench.sweeps.point import point_config
from ridgeline.lab.bench.sweeps.search import Search
from ridgeline.lab.bench.sweeps.sweep import SweepConfig, SweepResult, stopped, sweep
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.source import TrafficOptions

# ── the search ───────────────────────────────────────────────────────────────────────────────────────────


def searched(search: Search, carries: Callable[[float], bool]) -> list[float]:
    tried: list[float] = []
    while (load := search.next()) is not None:
        assert load not in tried, "no load is tried twice"
        tried.append(load)
        search.tell(load, carries(load))
        assert len(tried) < 60
    return tried


@settings(max_examples=200, deadline=None)
@given(limit=st.floats(0.05, 3000), start=st.floats(0.05, 3000))
def test_the_border_is_found_as_closely_as_asked(limit: float, start: float) -> None:
    search = Search(start, 0.01, 4096, precision=0.1)
    searched(search, lambda load: load <= limit)
    low, high = search.border
    assert low is not None
    assert high is not None
    assert low <= limit < high
    assert high / low <= 1.12
    assert "the border lies between" in search.reason


@settings(max_examples=100, deadline=None)
@given(limit=st.integers(1, 500))
def test_a_concurrency_is_found_to_a_tenth_or_exactly(limit: int) -> None:
    search = Search(1, 1, 1024, is_whole=True)
    tried = searched(search, lambda load: load <= limit)
    assert all(load == int(load) for load in tried)
    low, high = search.border
    assert low is not None
    assert high is not None
    assert low <= limit < high
    assert high - low == 1 or high / low <= 1.1


def test_limits_of_the_search_are_reached_and_named() -> None:
    up = Search(1, 0.1, 10)
    assert searched(up, lambda load: True) == [1, 2, 4, 8, 10]
    assert up.reason == "reached the maximum load: 10"
    down = Search(1, 0.3, 10)
    assert searched(down, lambda load: False) == [1, 0.5, 0.3]
    assert down.border[0] is None
    assert down.reason == "reached the minimum load: 0.3"


# ── judging, on records of a queue with one server ───────────────────────────────────────────────────────

CAPACITY = 10.0  # requests per second of the pretended server


def pretended(rate: float, seconds: float = 30.0, slo: str = "", failing: float = 0.0) -> BenchResult:
    """A server that answers one request after the other, each in 1/CAPACITY seconds."""
    records, free = [], 0.0
    for index in range(int(rate * seconds)):
        due = index / rate
        begun = max(due, free)
        free = begun + 1 / CAPACITY
        failed = index < failing * rate * seconds
        records.append(
            RequestRecord(
                index,
                t_sched=due,
                t_send=due,
                t_first=None if failed else begun + 0.5 / CAPACITY,
                t_first_visible=None,
                t_last=None if failed else free,
                t_end=free,
                status="failed" if failed else "ok",
                planned_in=10,
                planned_out=2,
                n_out=2,
                n_first=1,
                chunk_at=[begun + 0.5 / CAPACITY, free],
                chunk_tokens=[1, 1],
            )
        )
    summary = summarize(records, "open", parse_slo(slo) if slo else None)
    return BenchResult({}, summary, Validity(True), records, seconds=free)


async def swept(config: SweepConfig, folder: Path, **pretend: object) -> tuple[SweepResult, list[float]]:
    ran: list[float] = []

    async def run_point(load: float) -> BenchResult:
        ran.append(load)
        return pretended(load, **pretend)  # type: ignore[arg-type]

    return await sweep(config, run_point, folder), ran


async def test_without_a_limit_the_knee_is_where_the_server_falls_behind(tmp_path: Path) -> None:
    found, ran = await swept(SweepConfig("rate"), tmp_path)
    assert ran[:5] == [1, 2, 4, 8, 16]
    assert found.best is not None
    assert 0.9 * CAPACITY <= found.best <= 1.1 * CAPACITY
    worst = found.points[-1]
    assert not worst.carried
    assert worst.why_not.startswith("only ")
    assert found.ended.startswith("the border lies between")


async def test_with_a_limit_it_is_the_largest_rate_that_keeps_it(tmp_path: Path) -> None:
    slo = "ttft_p90=400ms"
    found, _ = await swept(SweepConfig("rate", slo=parse_slo(slo)), tmp_path, slo=slo)
    assert found.best is not None
    assert 0.9 * CAPACITY <= found.best <= 1.1 * CAPACITY
    assert found.points[-1].why_not.startswith("ttft_sched p90 is ")
    impossible = "ttft_p90=10ms"
    found, ran = await swept(
        SweepConfig("rate", slo=parse_slo(impossible), least=0.25), tmp_path / "b", slo=impossible
    )
    assert ran == [1, 0.5, 0.25]
    assert found.best is None


async def test_a_server_that_fails_much_does_not_carry_the_load(tmp_path: Path) -> None:
    found, _ = await swept(SweepConfig("rate", values=(2,)), tmp_path, failing=0.2)
    assert found.points[0].why_not == "20% of requests failed"


async def test_throughput_that_stops_growing_while_latency_does_is_the_knee(tmp_path: Path) -> None:
    def closed(concurrency: int) -> BenchResult:
        result = pretended(5.0)
        rate = min(concurrency, 8) / 0.5  # eight at once, half a second each
        metrics = dict(result.summary.metrics)
        for name, value in (("output_tokens_per_s", rate), ("e2e_ms", 1000 * concurrency / rate)):
            old = metrics[name]
            if name == "e2e_ms":
                estimate = msgspec.structs.replace(old.percentiles["p50"], value=value)
                metrics[name] = msgspec.structs.replace(old, percentiles={"p50": estimate})
            else:
                metrics[name] = msgspec.structs.replace(old, value=value)
        return msgspec.structs.replace(
            result, summary=msgspec.structs.replace(result.summary, mode="closed", metrics=metrics)
        )

    async def run_point(load: float) -> BenchResult:
        return closed(round(load))

    found = await sweep(SweepConfig("concurrency", least=1), run_point, tmp_path)
    assert found.best is not None
    assert 7 <= found.best <= 9
    assert "twice the load gives +0% throughput for +100% latency" in [p.why_not for p in found.points]


async def test_all_given_values_are_measured_whatever_comes_of_them(tmp_path: Path) -> None:
    found, ran = await swept(SweepConfig("rate", values=(20, 2, 40)), tmp_path)
    assert ran == [20, 2, 40]
    assert [point.load for point in found.points] == [2, 20, 40]
    assert found.ended == "all values were measured"


# ── stopping and going on ────────────────────────────────────────────────────────────────────────────────


async def test_a_stopped_sweep_goes_on_with_the_points_it_has(tmp_path: Path) -> None:
    async def interrupted(load: float) -> BenchResult:
        return msgspec.structs.replace(pretended(load), interrupted=load == 4)

    begun = await sweep(SweepConfig("rate"), interrupted, tmp_path)
    assert [point.load for point in begun.points] == [1, 2]
    assert begun.ended == "stopped by its user"
    found, ran = await swept(SweepConfig("rate"), tmp_path)
    assert ran[:2] == [4, 8]
    whole, _ = await swept(SweepConfig("rate"), tmp_path / "whole")
    assert msgspec.structs.replace(found, started_at="") == msgspec.structs.replace(whole, started_at="")
    assert SweepResult.load(tmp_path) == found


def test_ctrl_c_between_two_points_leaves_those_before_it(tmp_path: Path) -> None:
    async def interrupted(load: float) -> BenchResult:
        if load == 4:
            raise KeyboardInterrupt
        return pretended(load)

    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(sweep(SweepConfig("rate"), interrupted, tmp_path))
    found = stopped(tmp_path)
    assert ([point.load for point in found.points], found.is_interrupted) == ([1, 2], True)


async def test_another_sweeps_folder_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    await swept(SweepConfig("rate", values=(1,), identity={"url": "http://a", "seed": 0}), tmp_path)
    with pytest.raises(BadInput, match="url differs"):
        await swept(SweepConfig("rate", values=(1,), identity={"url": "http://b", "seed": 0}), tmp_path)
    with pytest.raises(BadInput, match="what it sweeps over differs"):
        await swept(SweepConfig("concurrency", least=1, identity={"url": "http://a", "seed": 0}), tmp_path)


async def test_no_point_is_begun_that_would_not_end_in_time(tmp_path: Path) -> None:
    times = iter(x * 10.0 for x in range(1000))  # every look at the clock is 10 s after the last
    found = await sweep(
        SweepConfig("rate", budget_s=60), lambda load: _soon(load), tmp_path, clock=lambda: next(times)
    )
    assert found.ended == "the time budget of 60 s is used up"
    assert [point.load for point in found.points] == [1, 2]


async def _soon(load: float) -> BenchResult:
    return pretended(load)


async def test_a_client_that_cannot_keep_up_ends_the_sweep(tmp_path: Path) -> None:
    async def run_point(load: float) -> BenchResult:
        return msgspec.structs.replace(pretended(load), validity=Validity(load < 3, ["too slow"]))

    found = await sweep(SweepConfig("rate"), run_point, tmp_path)
    assert [point.load for point in found.points] == [1, 2, 4]
    assert "the client could not keep up" in found.ended


async def test_a_server_that_is_gone_ends_the_sweep_with_what_was_measured(tmp_path: Path) -> None:
    async def run_point(load: float) -> BenchResult:
        if load > 2:
            raise LabError("no server answers at http://x")
        return pretended(load)

    found = await sweep(SweepConfig("rate"), run_point, tmp_path)
    assert found.ended == "at 4: no server answers at http://x"
    assert found.best == 2
    assert SweepResult.load(tmp_path) == found
    with pytest.raises(LabError, match="no server answers"):
        await sweep(SweepConfig("rate", start=4), run_point, tmp_path / "never")


@pytest.mark.parametrize(
    "wrong", [{"start": 0.001}, {"most": math.inf}, {"factor": 1.0}, {"values": (0.0,)}, {"most": 0.5}]
)
def test_a_sweep_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(BadInput):
        SweepConfig("rate", **wrong)


# ── the runs of its points ───────────────────────────────────────────────────────────────────────────────

BASE = BenchConfig("http://x", Traffic("", ()), OpenLoop())


def test_a_point_of_a_rate_holds_as_many_requests_as_its_time() -> None:
    config = point_config(BASE, TrafficOptions(input="10", output="3"), "rate", 4.0, 30.0)
    assert isinstance(config.mode, OpenLoop)
    assert len(config.traffic.requests) == 120
    assert config.traffic.duration_s == pytest.approx(30, rel=0.4)
    assert config.deadlines.run_s == 90
    assert len(point_config(BASE, TrafficOptions(), "rate", 0.01, 30.0).traffic.requests) == 8


def test_a_point_of_a_concurrency_ends_by_its_time() -> None:
    config = point_config(BASE, TrafficOptions(), "concurrency", 16.0, 20.0)
    assert config.mode == ClosedLoop(16)
    assert (len(config.traffic.requests), config.traffic.duration_s, config.duration_s) == (800, 0, 20)


@pytest.mark.parametrize(
    ("over", "options"),
    [("rate", {"rate": 3.0}), ("rate", {"arrivals": "closed"}), ("concurrency", {"arrivals": "poisson"})],
)
def test_what_the_sweep_sets_cannot_be_set_too(over: str, options: dict) -> None:
    with pytest.raises(BadInput, match="a sweep over"):
        point_config(BASE, replace(TrafficOptions(), **options), over, 1.0, 10.0)  # type: ignore[arg-type]
