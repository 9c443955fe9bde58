"""The display of a run's progress, and rates beside the machine's limits after it."""

from __future__ import annotations

import io

import pytest

from ridgeline.lab.bench.figures.ceilings import shares
from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.progress import Progress, shown
from tests.lab.bench.test_bench_metrics import answered

NOW = Progress(
    "run", done=40, total=100, failed=3, in_flight=7, elapsed_s=2.0, output_tokens=600, ttft_ms=51.2
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_few_seconds() -> None:
    clock, log = iter([0.0, 1.0, 6.0, 6.0, 7.0]), io.StringIO()
    with shown(log, lambda: next(clock)) as report:
        report(NOW)  # at 1 s: too early
        report(NOW)  # at 6 s
        report(NOW)  # at 7 s: too early again
    assert log.getvalue() == "run: 40 of 100 · 7 under way · 3 failed · 300 tok/s · TTFT 51 ms\n"


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    terminal = Terminal()
    with shown(terminal) as report:
        report(NOW)
    assert "40 of 100" in terminal.getvalue()


def test_rates_stand_beside_what_bandwidth_and_arithmetic_allow() -> None:
    """Ten answers a second apart, each of 6 tokens and 100 of prompt, 25 of them cached."""
    records = [answered(n, at=float(n), n_cached=25) for n in range(10)]
    summary = summarize(records, "open")
    together = summary.metrics["concurrency_mean"].value
    output, prompts = (summary.metrics[f"{kind}_tokens_per_s"].value for kind in ("output", "input"))
    assert together is not None
    assert output is not None
    assert prompts is not None
    limits = {"decode_tokens_per_s": 10.0, "prefill_tokens_per_s": 1000.0}
    found = {share.name: share for share in shares(records, summary, limits)}
    assert found["output_tokens_per_s"].limit == pytest.approx(together * 10)
    assert found["output_tokens_per_s"].share == pytest.approx(output / (together * 10))
    assert found["computed_tokens_per_s"].value == pytest.approx(0.75 * prompts + output)
    assert found["tpot_ms.p50"].share == pytest.approx(100 / 250)  # 1/10 s at best, 250 ms it took
    bound = {**limits, "prefill_tokens_per_s": 15.0}  # arithmetic binds before bandwidth does
    assert shares(records, summary, bound)[0].limit == 15.0
    assert shares(records, summary, {}) == []
