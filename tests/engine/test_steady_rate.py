"""A rate is measured until it is stable, or said to be uncertain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ridgeline.engine.limits.steady import Clock, steady_rate


class Machine:
    """Gives these rates in turn; each takes 10 ms, in which two threads have `share` of their cores."""

    def __init__(self, *rates: float, share: float = 1.0) -> None:
        self._rates: Iterator[float] = iter(rates)
        self._rate = rates[0]
        self._share = share
        self.now = self.measurements = 0.0
        self.clock = Clock(wall=lambda: self.now, cpu=lambda: 2 * self._share * self.now)

    def measure(self) -> float:
        self.now += 0.01
        self.measurements += 1
        self._rate = next(self._rates, self._rate)
        return self._rate


def test_a_quiet_machine_is_measured_twice_and_is_sure() -> None:
    machine = Machine(100.0, 98.0)
    found = steady_rate(machine.measure, threads=2, clock=machine.clock)
    assert (found.per_s, machine.measurements) == (100.0, 2)
    assert found.uncertainty == pytest.approx(0.02)


def test_a_disturbed_machine_is_measured_until_its_best_two_agree() -> None:
    machine = Machine(40.0, 70.0, 99.0, 35.0, 100.0, 1.0)
    found = steady_rate(machine.measure, threads=2, clock=machine.clock)
    assert (found.per_s, machine.measurements) == (100.0, 5)
    assert found.uncertainty == pytest.approx(0.01)


def test_a_machine_that_does_not_settle_is_uncertain_within_the_budget() -> None:
    machine = Machine(*(100.0 * 0.8**number for number in range(50)))
    found = steady_rate(machine.measure, threads=2, clock=machine.clock)
    assert found.per_s == 100.0
    assert found.uncertainty == pytest.approx(0.2)
    assert machine.now < 0.3


def test_measurements_that_agree_are_uncertain_where_others_had_the_cores() -> None:
    """Steady load makes every measurement equally low: it shows in the CPU time that the threads had."""
    machine = Machine(30.0, 30.0, share=0.3)
    found = steady_rate(machine.measure, threads=2, clock=machine.clock)
    assert found.per_s == 30.0
    assert found.uncertainty == pytest.approx(0.7)
