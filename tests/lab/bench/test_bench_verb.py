"""`ridgeline bench` itself: settings into a run, figures onto the terminal, a folder with all of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.bench.figures.metrics import FORMULAS
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.selftest import mock_server
from tests.patience import PATIENCE_S


@contextmanager
def mock_url() -> Iterator[str]:
    """The mock server in another thread: the verb has its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    mock = mock_server(5.0, 1.0)
    try:
        address = asyncio.run_coroutine_threadsafe(mock.__aenter__(), loop).result(PATIENCE_S)
        yield f"http://127.0.0.1:{address.port}"
    finally:
        asyncio.run_coroutine_threadsafe(mock.__aexit__(None, None, None), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with mock_url() as found:
        yield found


COMMON = ("--tokenizer", "smollm2-135m", "--input", "32", "--output", "8", "--warmup", "2")


def test_a_run_prints_its_figures_and_formulas_and_is_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    main(["bench", url, *COMMON, "--requests", "30", "--concurrency", "3", "--slo", "ttft=500,tpot=50",
          "--no-selftest", "--out", str(folder)])  # fmt: skip
    printed = capsys.readouterr().out
    kept = BenchResult.load(folder)
    assert kept.summary.ok == 30
    assert "self-test: SKIPPED (--no-selftest)" in printed
    assert "closed loop, 3 at once" in printed
    for name in kept.summary.metrics:
        assert f"{name:<22} {FORMULAS[name]}" in printed
    assert "the server does not report its limits" in printed
    assert kept.selftest == {"skipped": "--no-selftest"}
    assert kept.settings["slo"] == "ttft_p90=500ms,tpot_p90=50ms"


def test_a_rate_makes_an_open_loop_and_json_is_the_file(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", url, *COMMON, "--requests", "20", "--rate", "40", "--no-selftest", "--json"]
    main([*words, "--out", str(tmp_path), "--body", '{"top_p": 0.9}'])
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "run.json").read_text())
    assert printed["summary"]["mode"] == "open"
    assert printed["settings"]["body"]["top_p"] == 0.9


def test_an_invalid_run_is_loud_and_exits_with_1(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", url, *COMMON, "--requests", "3", "--no-selftest", "--output", "400",
                 "--deadline-s", "0.01", "--out", str(tmp_path)])  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 1
    assert printed.count("INVALID RUN: no request succeeded") == 2  # above and below the figures
    assert not BenchResult.load(tmp_path).validity.valid
    assert "request_timeout" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "2", "--rate", "3"], "give one of them"),
        (["--concurrency", "0"], "at least 1"),
        (["--slo", "speed=4"], "speed"),
        (["--body", "nonsense"], "--body is not JSON"),
        (["--traffic", "azure:/nowhere.csv"], "/nowhere.csv"),
        (["--concurency", "2"], "did you mean --concurrency"),
        (["--out", "/dev/null/run"], "cannot save a run there"),
    ],
)
def test_flags_that_make_no_sense_are_one_line_and_exit_2(
    url: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", url, "--no-selftest", *flags])
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2
    assert words in capsys.readouterr().err
