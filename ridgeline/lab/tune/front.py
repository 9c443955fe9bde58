"""Points and their Pareto front: each configuration's figures, and those that none beats. Pure data.

A point is its parent's figures times the measured effect, starting from the initial settings: runs of
different hours are not comparable, the two halves of a round are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.lab.tune.climb import changed
from ridgeline.lab.tune.effects import means
from ridgeline.lab.tune.ledger import NOISE_TRIAL, Ledger, Settings

THROUGHPUT = "output_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Point:
    settings: Settings
    trial: int  # that measured it
    tokens_per_s: float
    latency_ms: float
    usd_per_mtok: float | None  # of output tokens; None: hourly price unknown

    def beats(self, other: Point) -> bool:
        """At least as good in all three, and better in one."""
        pairs = [(-self.tokens_per_s, -other.tokens_per_s), (self.latency_ms, other.latency_ms)]
        if self.usd_per_mtok is not None and other.usd_per_mtok is not None:
            pairs.append((self.usd_per_mtok, other.usd_per_mtok))
        return all(own <= theirs for own, theirs in pairs) and any(own < theirs for own, theirs in pairs)


def points(ledger: Ledger, latency: str, usd_per_hour: float | None) -> list[Point]:
    """Every measured configuration, by its first trial."""
    figures: dict[int, tuple[float, float]] = {}
    found: list[Point] = []
    for trial in ledger.trials:
        verdict = ledger.verdict(trial.number)
        effects = {} if verdict is None else verdict.effects
        if trial.number == NOISE_TRIAL:
            mean = means([run.metrics for run in ledger.runs(NOISE_TRIAL) if run.outcome == "measured"])
            if THROUGHPUT not in mean or latency not in mean:
                continue
            figures[NOISE_TRIAL] = mean[THROUGHPUT], mean[latency]
        elif trial.parent in figures and THROUGHPUT in effects and latency in effects:
            rate, time = figures[trial.parent]
            rate *= 1 + effects[THROUGHPUT].change
            figures[trial.number] = rate, time * (1 + effects[latency].change)
        else:
            continue
        settings = changed(trial)
        if all(point.settings != settings for point in found):
            rate, time = figures[trial.number]
            cost = None if usd_per_hour is None else usd_per_hour / 3600 / rate * 1e6
            found.append(Point(settings, trial.number, rate, time, cost))
    return found


def front(found: Sequence[Point]) -> list[Point]:
    """The points that no other beats, by throughput."""
    best = [point for point in found if not any(other.beats(point) for other in found)]
    return sorted(best, key=lambda point: -point.tokens_per_s)
