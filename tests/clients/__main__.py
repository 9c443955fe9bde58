"""python -m tests.clients: run every case of the matrix, and write docs/clients.md with what came of it."""

from __future__ import annotations

import sys

import pytest

from tests.clients.cases import HERE, Case, all_cases, cases_of, write


class Recorder:
    """A pytest plugin: which cases passed. A case that several tests show passes if all of them do."""

    def __init__(self) -> None:
        self.results: dict[Case, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if isinstance(item, pytest.Function) and (report.when == "call" or not report.passed):
            client = item.callspec.params.get("client_name") if hasattr(item, "callspec") else None
            for case in cases_of(item.module, item.function, client):
                self.results[case] = self.results.get(case, True) and report.passed
        return report


def main() -> int:
    recorder = Recorder()
    arguments = [str(HERE), "--ignore", str(HERE / "test_matrix_page.py"), *sys.argv[1:]]
    code = pytest.main(arguments, plugins=[recorder])
    missing = set(all_cases()) - set(recorder.results)
    if missing:
        print(
            f"{len(missing)} cases did not run; the page is left as it was: {sorted(missing)[:5]}",
            file=sys.stderr,
        )
        return 1
    write(recorder.results)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
