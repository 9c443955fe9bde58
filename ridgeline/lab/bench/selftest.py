"""The self-test: the bench measures a server with known latencies and must find them.

Runs before every run (`ridgeline bench`) at the same load, and by name (`ridgeline bench selftest`). A client
that cannot measure known latencies on this machine at this load is refused: its figures for another server
would be worthless.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from ridgeline.lab.bench.client.client import Address
from ridgeline.lab.bench.client.plain_http import ask
from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop, RequestDeadlines
from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.mock_server import MockStats
from ridgeline.lab.bench.run import in_loop, run_bench
from ridgeline.lab.errors import LabError
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary

TTFT_MS, SPREAD_MS, TPOT_MS, TOKENS = 40.0, 20.0, 10.0, 16
TOLERANCE_MS, TOLERANCE_SHARE = 2.0, 0.02
START_TIMEOUT_S = 30.0
LEAST_REQUESTS = 40
MOST_CHUNKS_PER_S = 10_000  # for closed loops, whose rate depends on the server; few servers are faster
ATTEMPTS, BEFORE_S, LEAST_RATE = 3, 2.0, 20.0
_WORDS = Vocabulary(tuple(f"w{n}" for n in range(64)), tuple(range(64)), "tokenizer")


@dataclass(frozen=True, slots=True)
class Check:
    """One known value and what was measured."""

    name: str
    known: float
    measured: float

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE_MS, TOLERANCE_SHARE * self.known)

    @property
    def is_found(self) -> bool:
        return abs(self.measured - self.known) <= self.tolerance

    def __str__(self) -> str:
        return f"{self.name} {self.measured:.2f} ms, known {self.known:.2f} ± {self.tolerance:.1f}"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """failure: why the client is refused; "" if it is not. Costs are CPU seconds per unit of work."""

    load: str
    failure: str
    checks: tuple[Check, ...]
    requests_per_s: float
    chunks_per_s: float
    client_cpu: float
    client_us_per_request: float
    client_us_per_chunk: float  # all of its CPU, shared among the chunks
    dispatch_p99_ms: float | None
    mock: MockStats
    attempt: int = 1

    def lines(self) -> Iterator[str]:
        """For terminal output."""
        yield f"{self.load}: {'REFUSED: ' + self.failure if self.failure else 'passed'}"
        for check in self.checks:
            yield f"  {check}{'' if check.is_found else '   <- not found'}"
        delay = "none" if self.dispatch_p99_ms is None else f"{self.dispatch_p99_ms:.2f} ms"
        yield (
            f"  reached {self.requests_per_s:.0f} requests/s, {self.chunks_per_s:.0f} chunks/s; "
            f"dispatch delay P99 {delay}"
        )
        yield (
            f"  client: {self.client_cpu:.2f} of a core, {self.client_us_per_request:.0f} µs of CPU "
            f"a request ({self.client_us_per_chunk:.1f} µs a chunk)"
        )
        yield (
            f"  mock: {self.mock.cpu_s:.2f} s of CPU; late by {self.mock.late_p50_ms:.2f} ms (P50), "
            f"{self.mock.late_p99_ms:.2f} ms (P99)"
        )

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "passed": not self.failure,
            "failure": self.failure,
            "load": self.load,
            "attempt": self.attempt,
            "checks": [asdict(check) | {"tolerance": check.tolerance} for check in self.checks],
            "requests_per_s": self.requests_per_s,
            "chunks_per_s": self.chunks_per_s,
            "client_cpu": self.client_cpu,
            "client_us_per_request": self.client_us_per_request,
            "client_us_per_chunk": self.client_us_per_chunk,
            "dispatch_p99_ms": self.dispatch_p99_ms,
            "mock": msgspec.to_builtins(self.mock),
        }


async def self_test(load: OpenLoop | ClosedLoop, rate: float = 0.0, seconds: float = 3.0) -> SelfTest:
    """Measure the mock server at `rate` requests/s in an open loop, or at a closed loop's concurrency. Ctrl-C
    raises: there is nothing to keep yet.
    """
    tpot_ms = TPOT_MS
    if isinstance(load, OpenLoop):
        count = max(round(rate * seconds), LEAST_REQUESTS)
        moments, words = [number / rate for number in range(count)], f"open loop, {rate:g} requests/s"
    else:
        tpot_ms = max(TPOT_MS, 1000 * load.concurrency / MOST_CHUNKS_PER_S)
        each_s = (TTFT_MS + SPREAD_MS / 2 + (TOKENS - 1) * tpot_ms) / 1000
        count = max(round(load.concurrency * seconds / each_s), LEAST_REQUESTS, 2 * load.concurrency)
        moments, words = [0.0] * count, f"closed loop, {load.concurrency} at once"
    traffic = Traffic("self-test", tuple(PlannedRequest(at, 16, TOKENS) for at in moments))
    deadlines = RequestDeadlines(
        connect_s=5, first_byte_s=10, between_s=5, request_s=20, run_s=seconds * 5 + 30
    )
    async with mock_server(TTFT_MS, tpot_ms, SPREAD_MS) as mock:
        url = f"http://{mock.host}:{mock.port}"
        config = BenchConfig(url, traffic, load, deadlines=deadlines, vocabulary=_WORDS, cache="as_is")
        before = await stats_of(mock)
        result = await run_bench(config)
        if result.interrupted:
            raise KeyboardInterrupt
        return _verdict(words, result, tpot_ms, await stats_of(mock), before)


def passed_before(load: OpenLoop | ClosedLoop, rate: float) -> SelfTest:
    """The self-test before a run at this load. LabError if it fails; it is retried a few times, as other work
    on the machine can disturb one.
    """
    test = None
    for attempt in range(1, ATTEMPTS + 1):
        test = in_loop(self_test(load, max(rate, LEAST_RATE), BEFORE_S))
        if not test.failure:
            return replace(test, attempt=attempt)
    assert test is not None
    raise LabError(
        f"the bench does not find known latencies on this machine at this load, so it would not find those "
        f"of your server: {test.failure} (--no-selftest measures all the same, and says so)"
    )


@contextlib.asynccontextmanager
async def mock_server(ttft_ms: float, tpot_ms: float, spread_ms: float = 0.0) -> AsyncIterator[Address]:
    """The mock in a separate process, for the duration of the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridgeline.lab.bench.mock_server"),
        *("--ttft-ms", str(ttft_ms), "--tpot-ms", str(tpot_ms), "--spread-ms", str(spread_ms)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line.strip().isdigit():
            raise LabError("the self-test's mock server did not start; its output is above")
        yield Address("127.0.0.1", "127.0.0.1", int(line), None)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stats_of(mock: Address) -> MockStats:
    _, body = await ask(mock, "GET", "/stats")
    return msgspec.json.decode(body, type=MockStats)


def _verdict(load: str, result: BenchResult, tpot_ms: float, mock: MockStats, before: MockStats) -> SelfTest:
    summary = result.summary
    checks = _checks(summary, tpot_ms)
    failure = "; ".join([str(check) for check in checks if not check.is_found])
    # A run can also be invalid for reasons unrelated to known latencies.
    failure = "; ".join(part for part in (failure, *result.validity.reasons) if part)
    if summary.failed:
        failure = f"{summary.failed} of {summary.offered} requests failed: {summary.causes}; {failure}"
    if failure and mock.late_p90_ms > TOLERANCE_MS / 2:
        failure += (
            f"; the mock itself was {mock.late_p90_ms:.1f} ms late (P90): this machine has no CPU to spare"
        )
    client_s = result.seconds * (result.validity.client_cpu or 0.0)
    chunks = max(sum(len(record.chunk_at) for record in result.records), 1)
    delay = result.validity.client_delay_p99_ms
    return SelfTest(
        load,
        failure,
        checks,
        requests_per_s=rate.value or 0.0 if (rate := summary.metrics.get("requests_per_s")) else 0.0,
        chunks_per_s=chunks / result.seconds,
        client_cpu=result.validity.client_cpu or 0.0,
        client_us_per_request=1e6 * client_s / max(summary.offered, 1),
        client_us_per_chunk=1e6 * client_s / chunks,
        dispatch_p99_ms=delay,
        mock=msgspec.structs.replace(mock, cpu_s=mock.cpu_s - before.cpu_s),
    )


def _checks(summary: Summary, tpot_ms: float) -> tuple[Check, ...]:
    """P50, P90 and mean of the headline metrics; first tokens are spread evenly, so all are known."""
    first, _, whole = summary.headline
    rest = (TOKENS - 1) * tpot_ms
    known = {first: (TTFT_MS, SPREAD_MS), "tpot_ms": (tpot_ms, 0.0), whole: (TTFT_MS + rest, SPREAD_MS)}
    checks = []
    for name, (least, spread) in known.items():
        metric = summary.metrics[name]
        for key, share in (("p50", 0.5), ("p90", 0.9)):
            found = metric.percentiles[key]
            if found is not None:
                checks.append(Check(f"{name}.{key}", least + share * spread, found.value))
        if metric.mean is not None:
            checks.append(Check(f"{name}.mean", least + spread / 2, metric.mean))
    return tuple(checks)
