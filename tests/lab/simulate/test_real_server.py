"""Step times measured on a real server with a real model: the way from traffic to a fit and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.errors import LabError
from ridgeline.lab.perfmodel import stored
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes, Terms, TraceError
from ridgeline.lab.perfmodel.stored import kept_times
from ridgeline.lab.simulate import measure
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.measure import Fit, TrafficPhase, fit_server
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from tests.conftest import LiveServer

SECONDS = (3, 12, 48)  # until there are enough steps: a busy machine computes few in a second
PHASES = (
    TrafficPhase("one stream", 1, "uniform:8,64", "12", 0.5),
    TrafficPhase("several", 4, "uniform:8,64", "uniform:4,16", 0.5),
)


async def fitted(url: str) -> tuple[Fit, list[str], int]:
    """The fit, what was told of its phases, and its seconds."""
    for seconds in SECONDS:
        phases: list[str] = []
        try:
            fit = await fit_server(url, seconds=seconds, force=True, on_phase=phases.append)
        except LabError as error:
            if "are too few" not in str(error) or seconds == SECONDS[-1]:
                raise
            continue
        if fit.measured.front != FrontTimes():
            break
    return fit, phases, seconds


async def test_a_server_is_fitted_and_its_times_simulate(
    live_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "PHASES", PHASES)
    fit, phases, seconds = await fitted(live_server.base_url)
    measured = fit.measured
    assert phases == [f"one stream (1 of 2, {seconds / 2:.0f} s)", f"several (2 of 2, {seconds / 2:.0f} s)"]
    assert list(measured.times.fitted_on) == ["one stream", "several"]
    assert fit.path is not None
    assert fit.path.is_relative_to(tmp_path)
    assert kept_times("smollm2-135m") == (measured.times, measured.front)
    assert measured.times.about["model"] == "smollm2-135m"
    ids = [record.step_id for record in measured.steps["several"]]
    assert ids == list(range(ids[0], ids[-1] + 1))  # nothing lost, nothing of the phase before
    assert max(record.decode_batch for record in measured.steps["several"]) > 1
    assert measured.front.request_s > 0
    limits = SchedulerLimits(256, 256, 64, 512, 16, 4096, 8192)
    run = simulate(Traffic("one", (PlannedRequest(0.0, 40, 10),)), limits, measured.times)
    assert 0 < run.busy_s < 60


def test_a_bad_fit_is_refused_in_words_and_its_progress_is_told_without_a_terminal(
    live_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "PHASES", PHASES)
    monkeypatch.setattr(stored, "BAD_ERROR", -1.0)  # every fit is bad, also one with few steps
    good = StepTimes(
        Terms(0.01, (0.0,), (0.001,)), Terms(0.02, (0.0,), (0.001,)), errors=(TraceError("a", 9, 0, 0, 0),)
    )
    stored.keep_times(good, FrontTimes(), "smollm2-135m")
    for seconds in SECONDS:
        assert main(["plan", "fit", live_server.base_url, "--seconds", str(seconds)]) == 1
        told = capsys.readouterr().err
        if "are too few" not in told:
            break
    assert kept_times("smollm2-135m") == (good, FrontTimes())
    each = f"{seconds / 2:.0f} s"
    assert f"measuring: one stream (1 of 2, {each})\nmeasuring: several (2 of 2, {each})\n" in told
    assert "the fit was not stored: it" in told
    assert "--force" in told


async def test_a_server_that_cannot_be_reached_is_told() -> None:
    with pytest.raises(LabError, match="cannot reach"):
        await fit_server("http://127.0.0.1:9")
