"""The bench finds latencies that are known, and is refused where its client is made too slow to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.bench import selftest
from ridgeline.lab.bench.client.client import _Connection
from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.validity import judge
from ridgeline.lab.bench.mock_server import MockStats
from ridgeline.lab.bench.progress import Progress
from ridgeline.lab.bench.run import in_loop
from ridgeline.lab.bench.selftest import SelfTest, mock_server, self_test, stats_of
from ridgeline.lab.errors import LabError
from tests.patience import PATIENCE_S

BUSY = "this machine has no CPU to spare"


def until_passed(*load: Any) -> SelfTest:
    """Other tests may keep the machine busy for a while. One that is too busy all the time is told so, as it
    should be: then figures may be somewhat off. Nothing else is excused."""
    deadline = time.monotonic() + PATIENCE_S / 2  # longer than the minute of the load average
    while time.monotonic() < deadline:
        test = in_loop(self_test(*load))
        if not test.failure:
            return test
    is_busy = BUSY in test.failure or os.getloadavg()[0] >= len(os.sched_getaffinity(0))
    if is_busy and all(abs(check.measured - check.known) < 20 * check.tolerance for check in test.checks):
        pytest.skip(test.failure)
    return test


def test_known_latencies_are_found_in_an_open_loop() -> None:
    test = until_passed(OpenLoop(), 50.0, 1.0)
    assert test.failure == ""
    assert {check.name for check in test.checks} >= {"ttft_sched_ms.p50", "tpot_ms.p90", "e2e_sched_ms.mean"}
    assert test.mock.requests >= 50  # with the look before the run


def test_known_latencies_are_found_in_a_closed_loop() -> None:
    test = until_passed(ClosedLoop(8), 0.0, 1.0)
    assert test.failure == ""
    assert {check.name for check in test.checks} >= {"ttft_ms.p50", "e2e_ms.p90"}


def test_a_client_that_is_slow_to_look_at_what_came_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    received = _Connection.data_received

    def slowed(connection: _Connection, data: bytes) -> None:
        time.sleep(0.004)
        received(connection, data)

    monkeypatch.setattr(_Connection, "data_received", slowed)
    test = in_loop(self_test(OpenLoop(), 50.0, 1.0))
    assert "ttft_sched_ms" in test.failure
    assert "passed" in test.facts()
    assert not test.facts()["passed"]


def test_ctrl_c_during_the_self_test_is_one_and_not_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    real, interrupts = selftest.run_bench, []

    async def interrupted(config: BenchConfig) -> BenchResult:
        def once(progress: Progress) -> None:
            if not interrupts:
                interrupts.append(progress)
                os.kill(os.getpid(), signal.SIGINT)

        return await real(config, once)

    monkeypatch.setattr(selftest, "run_bench", interrupted)
    with pytest.raises(KeyboardInterrupt):
        selftest.passed_before(OpenLoop(), 20.0)
    assert len(interrupts) == 1


def test_a_run_is_refused_with_what_was_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TTFT_MS", 40.0)
    monkeypatch.setattr(selftest, "ATTEMPTS", 1)
    monkeypatch.setattr(selftest, "BEFORE_S", 0.5)
    real = selftest.mock_server
    monkeypatch.setattr(selftest, "mock_server", lambda ttft, tpot, spread: real(ttft + 20, tpot, spread))
    with pytest.raises(LabError, match=r"does not find known latencies.*ttft_sched_ms\.p50.*--no-selftest"):
        selftest.passed_before(OpenLoop(), 40.0)


def test_the_mock_keeps_how_late_it_was_itself() -> None:
    async def asked() -> MockStats:
        async with mock_server(5.0, 1.0) as mock:
            return await stats_of(mock)

    stats = in_loop(asked())
    assert (stats.requests, stats.tokens) == (0, 0)
    assert stats.cpu_s > 0


def test_the_mock_ends_with_whoever_started_it() -> None:
    command = [sys.executable, "-m", "ridgeline.lab.bench.mock_server", "--ttft-ms", "1", "--tpot-ms", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert int(process.stdout.readline()) > 0
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def test_the_verb_prints_what_was_known_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "selftest", "--concurrency", "4", "--seconds", "0.5", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["load"] == "closed loop, 4 at once"
    assert code == (0 if facts["passed"] else 1)
    assert main(["bench", "selftest", "--rate", "0"]) == 2


# ── the verdict on a run ──


def record(index: int, delay: float, connect_s: float = 0.0) -> RequestRecord:
    """Due at its index, sent `delay` late, answered in 100 ms."""
    at, sent = float(index), index + delay
    first, end = sent + 0.05, sent + 0.1
    return RequestRecord(
        index, at, sent, first, first, end, end, "ok", 4, 2, n_out=2, n_first=1, chunk_at=[first, end],
        chunk_tokens=[1, 1], connect_s=connect_s,
    )  # fmt: skip


def test_a_run_whose_client_sent_late_is_invalid() -> None:
    good = [record(n, 0.001) for n in range(100)]
    assert judge(good, summarize(good, "open"), 0.2).valid
    late = good[:-3] + [record(n, 0.05) for n in range(3)]
    verdict = judge(late, summarize(late, "open"), 0.2)
    assert not verdict.valid
    assert "the client sent 3 of 100 requests more than 10.0 ms late" in verdict.reasons[0]
    once = [*good[:-1], record(0, 0.05)]  # one outlier does not invalidate a run
    assert judge(once, summarize(once, "open"), 0.2).valid


def test_a_client_whose_loop_was_held_up_stamped_late_and_makes_a_run_invalid() -> None:
    good = [record(n, 0.001) for n in range(100)]
    summary = summarize(good, "closed")
    assert judge(good, summary, 0.2, lags=[0.001] * 200).valid
    now_and_then = judge(good, summary, 0.2, lags=[0.001] * 190 + [0.03] * 10)
    assert now_and_then.valid
    assert "was delayed" in now_and_then.warnings[0]
    assert not judge(good, summary, 0.2, lags=[0.001] * 150 + [0.03] * 50).valid


def test_waiting_for_a_server_to_accept_connections_is_not_the_clients_fault() -> None:
    waited = [record(n, 0.05, connect_s=0.049) for n in range(100)]
    assert judge(waited, summarize(waited, "open"), 0.2).valid


def test_a_client_out_of_cpu_makes_a_run_invalid() -> None:
    good = [record(n, 0.001) for n in range(100)]
    verdict = judge(good, summarize(good, "open"), 0.97)
    assert not verdict.valid
    assert "0.97" in verdict.reasons[0]


def test_a_self_test_that_failed_or_a_client_without_sockets_makes_a_run_invalid() -> None:
    good = [record(n, 0.001) for n in range(30)]
    assert "known" in judge(good, summarize(good, "open"), 0.1, "tpot 12, known 10").reasons[0]
    starved = [*good, RequestRecord(
        30, 30.0, None, None, None, None, 30.1, "failed", 4, 2, cause="client_out_of_sockets"
    )]  # fmt: skip
    assert "ulimit" in judge(starved, summarize(starved, "open"), 0.1).reasons[0]
