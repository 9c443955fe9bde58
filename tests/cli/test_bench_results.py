"""ridgeline bench report, compare, export and coldstart, as typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from tests.lab.bench.synthetic_runs import records, result


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "a", tmp_path / "b"
    for noise, folder in enumerate(folders):
        result(records(60, noise=noise)).save(folder)
    return folders


def test_report_writes_the_page_and_names_it(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "report", str(runs[0])]) == 0
    assert capsys.readouterr().out.strip() == str(runs[0] / "report.html")
    assert main(["bench", "report", str(runs[0] / "nothing")]) == 2
    assert "neither a run" in capsys.readouterr().err
    assert main(["bench", "report", str(runs[0]), "--out", "/nowhere/at/all.html"]) == 1
    assert capsys.readouterr().err == "ridgeline: /nowhere/at/all.html.part: No such file or directory\n"


def test_compare_prints_a_table_writes_a_page_and_fails_for_invalid_runs(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "c.html"
    assert main(["bench", "compare", *map(str, runs), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "60 requests, each compared with itself" in text
    assert "ttft_sched_ms.p90" in text
    assert "ttft_ms.p90" not in text  # an open loop is judged from the planned moment
    assert "Comparison of two runs" in page.read_text(encoding="utf-8")
    result(records(60), invalid=("sent late",)).save(runs[1])
    assert main(["bench", "compare", *map(str, runs), "--all"]) == 1
    assert capsys.readouterr().out.startswith("A run is INVALID")


def test_export_writes_another_tools_files(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "export", str(runs[0]), "--as", "vllm"]) == 0
    path = Path(capsys.readouterr().out.strip())
    found = json.loads(path.read_text())
    assert found["completed"] == 60
    assert found["date"] == "20260102-030405"
    assert found["request_rate"] == 6.0


def test_coldstart_reports_a_server_that_does_not_come_up_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} -c 'import sys; sys.exit(\"no model\")' {{port}}"
    options = [
        "--command",
        command,
        "--repeats",
        "1",
        "--page-cache",
        "as-is",
        "--out",
        str(tmp_path / "cold"),
    ]
    assert main(["bench", "coldstart", *options]) == 1
    assert "start 1: FAILED: the server ended with code 1; its last line: no model" in capsys.readouterr().out
    assert json.loads((tmp_path / "cold" / "coldstart.json").read_text())["starts"]
    assert main(["bench", "coldstart", "--command", "server", "--repeats", "1"]) == 2
    assert "{port}" in capsys.readouterr().err
