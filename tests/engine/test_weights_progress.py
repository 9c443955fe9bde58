"""The line that shows how far the weights are: late enough, not too often, gone when they are there."""

from __future__ import annotations

import io
import logging

import pytest

from ridgeline.engine.start.progress import DELAY_S, LOG_EVERY_S, WeightsProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fed(stream: io.StringIO, times: list[float], done: list[int], total: int = 100) -> None:
    clock = iter(times)
    progress = WeightsProgress(stream, lambda: next(clock))
    for each in done:
        progress(each, total)


def test_a_start_from_the_cache_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    fed(terminal, [0.0, 0.5, 0.9], [1, 50, 100])
    with caplog.at_level(logging.INFO, "ridgeline.engine"):
        fed(io.StringIO(), [0.0], [100])
    assert terminal.getvalue() == ""
    assert not caplog.records


def test_a_terminal_has_one_line_that_is_rewritten_and_removed() -> None:
    terminal = Terminal()
    fed(terminal, [0.0, DELAY_S, DELAY_S + 0.05, 4.0, 8.0], [1, 20, 21, 50, 100])
    assert terminal.getvalue().split("\r\x1b[K") == [
        "",
        "preparing weights: 20 %, about 4 s left",
        "preparing weights: 50 %, about 4 s left",
        "",
    ]


def test_a_log_has_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    second = DELAY_S + LOG_EVERY_S
    with caplog.at_level(logging.INFO, "ridgeline.engine"):
        fed(io.StringIO(), [0.0, DELAY_S, DELAY_S + 1, second, 30.0], [1, 10, 15, 50, 100])
    assert [record.message for record in caplog.records] == [
        "preparing weights: 10 %, about 9 s left",
        "preparing weights: 50 %, about 11 s left",
    ]
