"""Points and their Pareto front: what each configuration gives, and which none beats. Pure data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.lab.tune.effects import means
from ridgeline.lab.tune.ledger import Ledger, Settings

THROUGHPUT = "output_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration by the means of all its runs."""

    settings: Settings
    trials: tuple[int, ...]  # that measured it, on either side
    runs: int
    tokens_per_s: float
    latency_ms: float
    usd_per_mtok: float | None  # of output tokens; None: nobody said what an hour costs

    def beats(self, other: Point) -> bool:
        """As good in all three, and better in one."""
        pairs = [(-self.tokens_per_s, -other.tokens_per_s), (self.latency_ms, other.latency_ms)]
        if self.usd_per_mtok is not None and other.usd_per_mtok is not None:
            pairs.append((self.usd_per_mtok, other.usd_per_mtok))
        return all(own <= theirs for own, theirs in pairs) and any(own < theirs for own, theirs in pairs)


def points(ledger: Ledger, latency: str, usd_per_hour: float | None) -> list[Point]:
    """Every configuration that was measured, in the order of its first run."""
    runs: dict[str, list[dict[str, float]]] = {}
    trials: dict[str, list[int]] = {}
    settings: dict[str, Settings] = {}
    for run in ledger.runs():
        if run.outcome == "measured" and THROUGHPUT in run.metrics and latency in run.metrics:
            key = json.dumps(run.settings, sort_keys=True)
            runs.setdefault(key, []).append(run.metrics)
            settings.setdefault(key, run.settings)
            if run.trial not in trials.setdefault(key, []):
                trials[key].append(run.trial)
    found = []
    for key, metrics in runs.items():
        mean = means(metrics)
        rate = mean[THROUGHPUT]
        cost = None if usd_per_hour is None or rate <= 0 else usd_per_hour / 3600 / rate * 1e6
        found.append(Point(settings[key], tuple(trials[key]), len(metrics), rate, mean[latency], cost))
    return found


def front(found: Sequence[Point]) -> list[Point]:
    """The points that no other beats, by throughput."""
    best = [point for point in found if not any(other.beats(point) for other in found)]
    return sorted(best, key=lambda point: -point.tokens_per_s)
