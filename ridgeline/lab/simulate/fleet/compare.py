"""compare(): runs the same traffic under several routing policies; each figure has an interval over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.fleet.routing.policy import PolicyName
from ridgeline.lab.simulate.fleet.loop import OnProgress, simulate_fleet
from ridgeline.lab.simulate.fleet.result import FleetRun
from ridgeline.lab.simulate.fleet.setup import FleetSetup
from ridgeline.lab.slo import Slo
from ridgeline.lab.traffic.request import Traffic

POLICIES: tuple[PolicyName, ...] = ("round-robin", "least-loaded", "prefix", "default")
# Student's t, two-sided 95 %, by degrees of freedom; from 10 on it hardly changes.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds. half: half the width of its 95 % interval; None with one seed."""

    mid: float
    half: float | None

    @property
    def low(self) -> float:
        return self.mid - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mid + (self.half or 0.0)


@dataclass(slots=True)
class Compared:
    """figures: policy → figure → a value for each seed, in the same order everywhere."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    runs: dict[str, FleetRun] = field(default_factory=dict)  # of the first seed

    def mean(self, policy: str, figure: str) -> Mean:
        return mean_of(self.figures[policy][figure])

    def ratio(self, policy: str, base: str, figure: str) -> Mean:
        """The mean of the ratios seed by seed: the differences between seeds cancel out."""
        pairs = zip(self.figures[policy][figure], self.figures[base][figure], strict=True)
        return mean_of([one / other if other else math.nan for one, other in pairs])


def compare(
    traffic_of: Callable[[int], Traffic],
    setup: FleetSetup,
    slo: Slo,
    policies: Sequence[PolicyName] = POLICIES,
    seeds: int = 3,
    on_progress: OnProgress | None = None,
) -> Compared:
    """traffic_of: the traffic for a seed; for a trace with coarse times, the seed spreads the arrivals."""
    found = Compared({policy: {} for policy in policies})
    total = len(policies) * seeds
    for number in range(seeds):
        traffic = traffic_of(setup.seed + number)
        for place, policy in enumerate(policies):
            run = simulate_fleet(
                traffic,
                replace(setup, policy=policy, seed=setup.seed + number),
                _part(on_progress, number * len(policies) + place, total),
            )
            found.runs.setdefault(policy, run)
            for name, value in run.figures(slo).items():
                found.figures[policy].setdefault(name, []).append(value)
    return found


def mean_of(values: Sequence[float]) -> Mean:
    mid = statistics.fmean(values)
    if len(values) < 2:
        return Mean(mid, None)
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return Mean(mid, _T[min(len(values) - 2, len(_T) - 1)] * deviation)


def _part(on_progress: OnProgress | None, number: int, total: int) -> OnProgress | None:
    """Turns the progress of one run into that of all runs."""
    if on_progress is None:
        return None
    return lambda done, of, seconds: on_progress(number * of + done, total * of, seconds)
