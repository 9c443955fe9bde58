"""Measures a machine's rate until it is stable, within a small time budget. No torch; called by `limits`.

Other programs only lower a rate. So the best of the repeats counts, and it is certain if the two best agree
and the measuring threads had their cores. A rate that does not settle in time has an uncertainty.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

BUDGET_S = 0.25
FEWEST = 2
ALIKE = 0.05  # most relative difference between the two best
STARVED = 0.5  # fraction of its cores: with less, a measurement shows the other programs
UNCERTAIN = 0.1  # from here on, figures are shown with a "~"


@dataclass(frozen=True, slots=True)
class Rate:
    """uncertainty: by what fraction it may be too low, as far as the measurements show."""

    per_s: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Elapsed seconds, and CPU seconds of this process."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


def steady_rate(
    measure: Callable[[], float],
    threads: int | None = None,
    budget_s: float = BUDGET_S,
    clock: Clock | None = None,
) -> Rate:
    """The best of repeats, until the two best agree or the budget is spent.

    threads: threads that compute during the whole measurement, so that CPU time shows whether they had their
    cores; None: they wait for each other or for memory, and CPU time shows nothing
    """
    clock = clock or Clock()
    began = clock.wall()
    rates: list[float] = []
    had_cores = 0.0
    while True:
        wall, cpu = clock.wall(), clock.cpu()
        rates.append(measure())
        wall, cpu = clock.wall() - wall, clock.cpu() - cpu
        if threads is None:
            had_cores = 1.0
        elif wall > 0:
            had_cores = max(had_cores, cpu / (wall * threads))
        rates.sort(reverse=True)
        differ = 1 - rates[1] / rates[0] if len(rates) >= FEWEST and rates[0] > 0 else 1.0
        starved = 1 - had_cores if had_cores < STARVED else 0.0
        if differ <= ALIKE and not starved:
            return Rate(rates[0], differ)
        if len(rates) >= FEWEST and clock.wall() - began >= budget_s:
            return Rate(rates[0], max(differ, starved))
