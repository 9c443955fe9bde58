"""`ridgeline bench sweep` against the mock server: what it prints and keeps, and that it goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.bench.selftest import mock_server
from ridgeline.lab.bench.sweeps.sweep import SweepResult


async def test_a_sweep_prints_a_line_for_each_load_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    async with mock_server(20.0, 2.0) as mock:
        command = ["bench", "sweep", f"http://127.0.0.1:{mock.port}", "--out", str(out), "--no-selftest"]
        command += ["--point-s", "1", "--input", "20", "--output", "5", "--warmup", "0"]
        first = await asyncio.to_thread(main, [*command, "--over", "concurrency", "--values", "1,4"])
        printed = capsys.readouterr().out
        assert first == 0
        assert [line.split()[0] for line in printed.splitlines()] == [
            "concurrency",
            "1",
            "4",
            "largest",
            "ended:",
        ]
        assert all((out / place / "report.html").exists() for place in ("", "concurrency-1"))
        kept = SweepResult.load(out)
        assert [point.load for point in kept.points] == [1, 4]
        assert [point.metrics["concurrency_peak"] for point in kept.points] == [1, 4]
        assert json.loads((out / "concurrency-4" / "run.json").read_text())["settings"]["concurrency"] == 4
        stamp = (out / "concurrency-1" / "run.json").stat().st_mtime_ns
        assert await asyncio.to_thread(main, [*command, "--over", "concurrency", "--values", "1,4,2"]) == 0
        assert (out / "concurrency-1" / "run.json").stat().st_mtime_ns == stamp, "measured once is enough"
        assert [point.load for point in SweepResult.load(out).points] == [1, 2, 4]
        capsys.readouterr()
        assert await asyncio.to_thread(main, [*command, "--over", "rate", "--values", "5"]) == 2
        assert "holds another sweep (what it sweeps over differs)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--values", "1,x"], "--values: 'x' is not a number"),
        (["--start", "5", "--most", "2"], "a sweep needs 0 < least ≤ start ≤ most"),
        (["--over", "concurrency", "--arrivals", "poisson"], "drop --rate and --arrivals"),
        (["--input", "lognormal:3"], "--input: 'lognormal:3' needs MEAN,SIGMA"),
    ],
)
def test_mistakes_are_said_before_anything_is_sent(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "sweep", "http://127.0.0.1:9", "--no-selftest", "--out", str(tmp_path / "s")]
    assert main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
