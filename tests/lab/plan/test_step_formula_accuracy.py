"""The analytic model against what others measured, each deployment predicted by constants of the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the extra `lab` is not installed")

from ridgeline.lab.perfmodel import fit_constants
from ridgeline.lab.perfmodel.constants import shipped
from ridgeline.lab.perfmodel.held_out import HeldOut, covered, leave_one_out, score
from ridgeline.lab.perfmodel.measured import MeasuredPoint, read_points
from ridgeline.lab.perfmodel.step_formula import predict_tpot

DATA = Path(__file__).parents[4] / "shared" / "data"

pytestmark = pytest.mark.skipif(
    not (DATA / "measured-serving").is_dir(), reason=f"needs {DATA / 'measured-serving'}"
)


@pytest.fixture(scope="module")
def points() -> list[MeasuredPoint]:
    return read_points(DATA)


@pytest.fixture(scope="module")
def aggregated(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    return [point for point in points if not point.disaggregated]


@pytest.fixture(scope="module")
def held_out(aggregated: list[MeasuredPoint]) -> HeldOut:
    # Nested widths take a minute (benchmarks/plan_accuracy.py); these differ from them by 2 points at most.
    return leave_one_out(aggregated, nested=False)


def test_every_measured_point_is_read(points: list[MeasuredPoint]) -> None:
    assert len(points) == 2456
    assert sum(point.disaggregated for point in points) == 691
    assert sum(not point.is_mixture and not point.disaggregated for point in points) == 639


def test_held_out_dense_deployments_are_within_the_bar(
    aggregated: list[MeasuredPoint], held_out: HeldOut
) -> None:
    dense = np.array([not point.is_mixture for point in aggregated])
    measured = np.array([point.tpot_s for point in aggregated])
    assert score(held_out.tpot_s[dense], measured[dense]).median <= 12


def test_held_out_mixtures_are_within_the_bar(aggregated: list[MeasuredPoint], held_out: HeldOut) -> None:
    mixture = np.array([point.is_mixture for point in aggregated])
    measured = np.array([point.tpot_s for point in aggregated])
    assert score(held_out.tpot_s[mixture], measured[mixture]).median <= 20


@pytest.mark.parametrize("metric", ["tpot", "ttft"])
def test_intervals_hold_as_often_as_they_claim(
    aggregated: list[MeasuredPoint], held_out: HeldOut, metric: str
) -> None:
    predicted, width = (getattr(held_out, f"{metric}_{what}") for what in ("s", "width"))
    inside = covered(predicted, width, np.array([getattr(point, f"{metric}_s") for point in aggregated]))
    mixture = np.array([point.is_mixture for point in aggregated])
    for chosen in (mixture, ~mixture, mixture | ~mixture):
        assert 0.75 <= inside[chosen].mean() <= 0.85


def test_a_held_out_deployment_says_nothing_about_itself(aggregated: list[MeasuredPoint]) -> None:
    """With its own measurements ten times as long, a deployment's prediction stays what it was."""
    table = fit_constants.columns(aggregated)
    held = table.groups == 0
    rest = table.where(~held)
    before = fit_constants.predict(fit_constants.fit(rest), table.where(held))[0]
    assert not np.any(rest.groups == 0)
    table.tpot_s[held] *= 10
    after = fit_constants.predict(fit_constants.fit(table.where(~held)), table.where(held))[0]
    np.testing.assert_array_equal(before, after)


def test_the_constants_that_ship_are_those_of_this_fit(aggregated: list[MeasuredPoint]) -> None:
    shared, engines = fit_constants.fit(fit_constants.columns(aggregated)).coefficients()
    known = shipped()
    assert known.points == len(aggregated)
    assert known.shared == pytest.approx(shared, rel=0.02, abs=1e-12)
    for engine, values in engines.items():
        assert known.engines[engine] == pytest.approx(values, rel=0.05, abs=1e-12)


def test_the_shipped_prediction_in_plain_numbers_is_the_fitted_one(aggregated: list[MeasuredPoint]) -> None:
    """Arrays for fitting and numbers for planning go through one formula."""
    table = fit_constants.columns(aggregated)
    fitted = fit_constants.predict(fit_constants.fit(table), table)[0]
    for row in range(0, len(aggregated), 97):
        point = aggregated[row]
        mid = predict_tpot(point.deployment, point.batch, point.isl, point.osl).mid
        assert mid == pytest.approx(fitted[row], rel=0.02)
