"""The width of predictions from fitted step times: held-out errors, changes of speed, age and load."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from ridgeline.lab.perfmodel.step_times import StepTimes, Terms, TraceError
from ridgeline.lab.plan.choose_step_times import FITTED_SPREAD, fitted_range

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
FRESH = StepTimes(
    Terms(0.01, (0.0,), (0.001,)),
    Terms(0.02, (0.0,), (0.001,)),
    errors=(TraceError("a", 100, 0.02, 0.05, 0.04),),
    made_at=(NOW - timedelta(minutes=5)).isoformat(),
    speeds=(0.97, 1.05),
    load_before=0.1,
)


def test_a_fresh_fit_on_a_quiet_machine_is_as_wide_as_replays_were_off() -> None:
    low, high, caveats = fitted_range(FRESH, NOW, load=0.1)
    assert (low, high) == pytest.approx((1 / (1 + FITTED_SPREAD), 1 + FITTED_SPREAD))
    assert caveats == ()


def test_a_fit_on_a_machine_that_changed_its_speed_is_as_wide_as_that() -> None:
    """A run may spend all its time in the slow state: TPOT was 3.4 times what such a fit predicted."""
    busy = msgspec.structs.replace(FRESH, speeds=(0.6, 3.4))
    low, high, caveats = fitted_range(busy, NOW, load=0.1)
    assert (low, high) == (0.6, 3.4)
    assert "busy while it was fitted" in caveats[0]


def test_a_fit_widens_as_it_ages() -> None:
    highs = [fitted_range(FRESH, NOW + timedelta(days=days), load=0.1)[1] for days in (0, 1, 10, 100)]
    assert highs == sorted(set(highs))
    assert highs[2] - highs[1] == pytest.approx(0.05, abs=0.001)  # a tenfold of its age


def test_a_machine_busier_than_at_the_fit_may_be_slower_by_the_tasks_it_shares_with() -> None:
    low, high, caveats = fitted_range(FRESH, NOW, load=1.2)
    assert high == pytest.approx((1 + FITTED_SPREAD) * 2.2 / 1.1)
    assert low == pytest.approx(1 / (1 + FITTED_SPREAD))
    assert "load now is 1.2 tasks per core, and was 0.1 before the fit" in caveats[0]
    low, high, _ = fitted_range(msgspec.structs.replace(FRESH, load_before=1.2), NOW, load=0.1)
    assert low == pytest.approx(1.1 / 2.2 / (1 + FITTED_SPREAD))


def test_a_fit_that_tells_neither_its_load_nor_its_moment_is_as_wide_as_it_missed() -> None:
    old = msgspec.structs.replace(FRESH, made_at="", load_before=None)
    assert fitted_range(old, NOW, load=2.0)[1] == pytest.approx(1 + FITTED_SPREAD)
