"""The loop closed on this machine: a plan is served and measured as it says, scored, and learnt from."""

import json
import shlex
import signal
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.engine.limits.calibration import (
    Calibration,
    Ceilings,
    ReadRate,
    store_calibration,
    this_machine,
)
from ridgeline.lab.plan.residuals import read_residuals
from ridgeline.lab.prediction import read_prediction
from tests.conftest import STOP_TIMEOUT_S, await_ready, start_server

# The limits are loose, since this machine may be doing anything else too.
QUESTION = (
    "--hardware", "cpu", "--input", "24", "--output", "8", "--rate", "8", "--requests", "40",
    "--slo", "ttft_p50=60s,tpot_p50=20s", "--set", "kv_tokens=4096",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    # Else every plan would measure the processor for seconds, and never find the same.
    ceilings = Ceilings((ReadRate(1 << 28, 2e10),), {"float32": 2e11, "bfloat16": 4e11, "int8": 4e11})
    store_calibration(Calibration(this_machine(), ceilings))


def test_a_plan_is_served_measured_scored_and_corrected(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "plan", tmp_path / "run"
    assert main(["plan", str(smollm2_path), *QUESTION, "--out", str(folder)]) == 0
    made = read_prediction(folder / "prediction.json")
    assert (made.method, made.uncorrected) == ("analytic", {})

    server = start_server(tmp_path / "server.log", "--config", str(folder / "plan.toml"), models=())
    try:
        await_ready(server)
        command = made.traffic["bench"].replace("http://127.0.0.1:8000", server.base_url)
        assert main([*shlex.split(command)[1:], "--no-selftest", "--out", str(run)]) in (0, 1)
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(STOP_TIMEOUT_S)

    # A busy machine may have made the run invalid; then it is refused, and forced it teaches nothing.
    valid = json.loads((run / "run.json").read_text())["validity"]["valid"]
    capsys.readouterr()
    scored = ["plan", "verify", str(folder / "prediction.json"), str(run)]
    if not valid:
        assert main(scored) == 2
        assert main([*scored, "--force"]) == 0
        assert read_residuals() == []
        pytest.skip("the run was invalid: other programs keep this machine busy")
    assert main(scored) == 0
    text = capsys.readouterr().out
    assert "ttft_ms.p50" in text
    assert "median error" in text
    kept = {residual.metric: residual for residual in read_residuals()}
    assert kept["tpot_ms.p50"].predicted == made.metrics["tpot_ms.p50"].mid

    assert main(["plan", str(smollm2_path), *QUESTION, "--out", str(folder)]) == 0
    again = read_prediction(folder / "prediction.json")
    for metric in ("ttft_ms.p50", "tpot_ms.p50"):
        computed, corrected = again.uncorrected[metric].mid, again.metrics[metric].mid
        assert (corrected - computed) * kept[metric].log_ratio > 0  # towards what was measured
    capsys.readouterr()
    assert main(["plan", "verify", str(folder / "prediction.json"), str(run), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["scores"]
