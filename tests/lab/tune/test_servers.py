"""Real servers under the tuner: measured, refused, dead; and one whole trial, which takes a while."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.lab.tune.climb import NotMeasured, RunId, Search
from ridgeline.lab.tune.ledger import Ledger
from ridgeline.lab.tune.measure import ServerMeasure, Workload
from ridgeline.lab.tune.run import TuneRequest, opened
from ridgeline.lab.tune.servers import TunedServer

MODEL = "smollm2-135m"
TRAFFIC = TrafficOptions(input="40", output="4", requests=3)
WORKLOAD = Workload(TRAFFIC, concurrency=2, warmup=1, run_s=60.0, keep_invalid=True)


def measure(folder: Path) -> ServerMeasure:
    return ServerMeasure(MODEL, WORKLOAD, folder, None, lambda text: None)


def test_a_configuration_is_measured_on_a_server_of_its_own(smollm2_path: Path, tmp_path: Path) -> None:
    metrics = measure(tmp_path)({"kv_tokens": 2048, "step_tokens": 64}, RunId(3, 1, "b"))
    assert metrics["output_tokens_per_s"] > 0
    assert metrics["failures"] == 0
    folder = tmp_path / "003-2b"
    kept = BenchResult.load(folder)
    assert kept.summary.ok == 3
    assert kept.settings["seed"] == 1
    assert "step_tokens = 64" in (folder / "config.toml").read_text()


def test_settings_that_the_engine_refuses_are_told_with_its_reason(
    smollm2_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotMeasured, match="lower --kv-tokens") as caught:
        measure(tmp_path)({"kv_tokens": 10**12}, RunId(1, 0, "b"))
    assert caught.value.outcome == "refused"


def test_a_server_that_dies_is_told_of(smollm2_path: Path, tmp_path: Path) -> None:
    with TunedServer(MODEL, {"kv_tokens": 2048}, tmp_path) as server:
        server.check_alive()
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        with pytest.raises(NotMeasured, match="SIGKILL") as caught:
            server.check_alive()
    assert caught.value.outcome == "died"


def request(**changes: object) -> TuneRequest:
    values = {
        "model": MODEL,
        "base": {},
        "workload": WORKLOAD,
        "objective": "output_tokens_per_s",
        "rounds": 3,
    }
    return TuneRequest(**(values | changes))  # type: ignore[arg-type]


def test_a_workload_comes_back_from_the_ledger_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path, request()):
        pass
    with opened(tmp_path, None) as ledger:
        assert ledger.header is not None
        assert Workload.from_dict(ledger.header.workload) == WORKLOAD


def test_what_is_searched_is_kept_for_those_who_go_on_and_may_change(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Search] = []
    monkeypatch.setattr(
        "ridgeline.lab.tune.run.climb", lambda ledger, search, *rest: searched.append(search) or "done"
    )
    begun = ["tune", MODEL, "--ledger", str(tmp_path), "--try", "max_running=1,8", "--requests", "3"]
    assert main(begun) == 0
    assert main(["tune", "--ledger", str(tmp_path)]) == 0
    assert main(["tune", "--ledger", str(tmp_path), "--try", "threads=1,2"]) == 0
    assert main([*begun[:4], "--try", "threads=1,2", "--requests", "3"]) == 0
    spaces = [{key: tuple(values) for key, values in search.space.items()} for search in searched]
    assert spaces == [{"max_running": (1, 8)}] * 2 + [{"threads": (1, 2)}] * 2


def test_a_ledger_is_not_gone_on_with_under_another_load(tmp_path: Path) -> None:
    with opened(tmp_path, request()):
        pass
    with opened(tmp_path, request()):
        pass
    other = Workload(TrafficOptions(input="80", output="4", requests=3), 2, 1, 60.0, keep_invalid=True)
    with pytest.raises(BadInput, match="input '40', not '80'"), opened(tmp_path, request(workload=other)):
        pass
    with pytest.raises(BadInput, match="rounds 3, not 4"), opened(tmp_path, request(rounds=4)):
        pass


def test_wrong_usage_is_refused_before_a_server_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "none")
    for arguments, wanted in (
        (["tune", "--ledger", folder], "name a MODEL"),
        (["tune", "--ledger", folder, "--rounds", "4"], "--rounds is for a new ledger"),
        (["tune", "show", "--ledger", folder], "there is no ledger"),
        (["tune", "trial", "threads=1", "max_running=2", "--ledger", folder], "one key, not 2"),
        (
            ["tune", MODEL, "--ledger", folder, "--rounds", "2"],
            "must be at least 3, got 2: of two rounds",
        ),
        (["tune", MODEL, "--ledger", folder, "--rounds", "0"], "--rounds must be at least 3"),
        (["tune", MODEL, "--ledger", folder, "--concurrency", "0"], "--concurrency must be at least 1"),
        (["tune", MODEL, "--ledger", folder, "--run-s", "0"], "--run-s and --ready-s must be above 0"),
        (["tune", MODEL, "--ledger", folder, "--usd-per-hour", "0"], "--usd-per-hour must be above 0"),
        (["tune", MODEL, "--ledger", folder, "--objective", "client_cpu"], "no better direction"),
        (["tune", MODEL, "--ledger", folder, "--rate", "2", "--concurrency", "4"], "--concurrency"),
        (["tune", MODEL, "--ledger", folder, "--try", "stap=1"], "unknown engine setting"),
        (["tune", MODEL, "--ledger", folder, "--hardware", "h2000"], "h200"),
    ):
        assert main(arguments) == 2, arguments
        assert wanted in capsys.readouterr().err
    assert not (tmp_path / "none" / "ledger.jsonl").exists()


@pytest.mark.slow
def test_a_whole_search_on_real_servers(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "tune",
        MODEL,
        "--ledger",
        str(tmp_path),
        "--set",
        "kv_tokens=4096",
        "--set",
        "max_running=1",
    ]
    arguments += ["--try", "max_running=1,8", "--concurrency", "8", "--requests", "8", "--input", "30"]
    arguments += ["--output", "24", "--warmup", "2", "--rounds", "3", "--keep-invalid"]
    assert main(arguments) == 0
    with Ledger(tmp_path, write=False) as ledger:
        verdict = ledger.verdict(1)
        assert verdict is not None
        assert verdict.rounds == 3
        assert "max_running 1 → 8" in capsys.readouterr().out
    assert (tmp_path / "winner.toml").exists()
    assert (tmp_path / "ledger.html").exists()
