"""A pytest plugin that writes the ids of failed tests, one a line: `pytest @FILE` then runs them once more.

    python -m pytest -p tools.failed_tests --failed-to FILE

It writes no file where a second run could not make up for the first: more than three tests failed, a test
ended its process, or pytest was interrupted or found errors in a file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

AT_MOST = 3
CRASH = "???"  # the phase that xdist reports for a test whose process ended


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--failed-to", metavar="FILE", type=Path, help="write the ids of at most 3 failed tests here"
    )


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("failed_to")
    if path is not None and not hasattr(
        config, "workerinput"
    ):  # the processes of xdist report to the first one
        path.unlink(missing_ok=True)
        config.pluginmanager.register(FailedTests(path))


class FailedTests:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, None] = {}
        self._crashed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._ids[report.nodeid] = None
            self._crashed |= report.when == CRASH

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and 0 < len(self._ids) <= AT_MOST and not self._crashed:
            self._path.write_text("".join(f"{node_id}\n" for node_id in self._ids))
