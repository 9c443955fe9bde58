"""From rounds of A and B to effects with intervals, and from effects to a verdict. Pure functions.

Rounds are pairs: both halves had the same traffic, one right after the other. The logarithm of B/A is
averaged over them, with Student's t for the interval; a change counts if its interval excludes zero and it
exceeds the difference between two runs of the same settings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import Limit, Slo
from ridgeline.lab.tune.ledger import Decision, Effect

CONFIDENCE = 0.95
MORE_FAILURES = 0.005  # maximum rise of the share of failed requests
Metrics = Mapping[str, float]


def more_is_better(metric: str) -> bool:
    """Rates and success shares should rise, times and failures should fall."""
    name = metric.partition(".")[0].removeprefix("adj_")
    if name.endswith("_per_s") or name in ("attainment", "cache_hit"):
        return True
    if name.endswith("_ms") or name == "failures":
        return False
    raise BadInput(
        f"{metric} has no better direction: take a rate (…_per_s), a time (…_ms.p90) or attainment"
    )


def effects(
    rounds: Sequence[tuple[Metrics, Metrics]], noise: Mapping[str, Effect] | None = None
) -> dict[str, Effect]:
    """The change of every metric that all rounds have with values above zero. Needs two rounds."""
    if len(rounds) < 2:
        return {}
    names = [
        name
        for name in rounds[0][0]
        if all(
            math.isfinite(half.get(name, 0.0)) and half.get(name, 0.0) > 0 for pair in rounds for half in pair
        )
    ]
    return {name: _effect(rounds, name, (noise or {}).get(name)) for name in names}


def _effect(rounds: Sequence[tuple[Metrics, Metrics]], name: str, noise: Effect | None) -> Effect:
    from scipy.stats import t

    ratios = [math.log(b[name] / a[name]) for a, b in rounds]
    mean = statistics.mean(ratios)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(ratios) - 1)) * error
    floor = None if noise is None else noise.most_factor - 1
    return Effect(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half), floor)


def decide(
    found: Mapping[str, Effect], objective: str, after: Metrics, slo: Slo | None, more_failures: float
) -> tuple[Decision, str]:
    """Accepted: the objective is better beyond noise, no limit is newly broken, no more requests fail.

    after: means of B. more_failures: the mean rise of the share of failed requests.
    """
    effect = found.get(objective)
    if effect is None:
        return "undecided", f"{objective} was not measured in all rounds"
    if more_failures > MORE_FAILURES:
        return "rejected", f"{more_failures:.1%} more of the requests failed"
    better = (effect.change > 0) == more_is_better(objective)
    if not effect.is_beyond_noise:
        return "rejected", f"{objective} {percent(effect)}: within the noise"
    if not better:
        return "rejected", f"{objective} {percent(effect)}: worse"
    for limit in slo.limits if slo else ():
        broken = _broken(limit, found, after)
        if broken:
            return "rejected", f"{objective} {percent(effect)}, but {broken}"
    return "accepted", f"{objective} {percent(effect)}"


def _broken(limit: Limit, found: Mapping[str, Effect], after: Metrics) -> str:
    """Where B breaks a limit, and not clearly less than A. If a percentile has too few samples (P99), the
    share of good answers is used.
    """
    value, change = after.get(limit.key), found.get(limit.key)
    if value is not None:
        is_broken = value > limit.ms and (change is None or change.high > 0)
        return f"{limit.key} is {value:.0f} ms, above {limit}" if is_broken else ""
    good, change = after.get("attainment"), found.get("attainment")
    if good is None or good >= limit.percentile / 100 or (change is not None and change.low > 0):
        return ""
    return f"{good:.1%} of answers kept the limits, and {limit} asks for {limit.percentile} %"


def percent(effect: Effect) -> str:
    """+4.2 % [+2.9, +5.5]; more than tenfold is shown as a factor."""
    high = f"{100 * effect.high:+.1f}" if effect.high < 9 else f"{1 + effect.high:.3g} times"
    return f"{100 * effect.change:+.1f} % [{100 * effect.low:+.1f}, {high}]"


def means(runs: Sequence[Metrics]) -> dict[str, float]:
    """Of the metrics that all of them have."""
    if not runs:
        return {}
    return {
        name: statistics.fmean(run[name] for run in runs)
        for name in runs[0]
        if all(name in run for run in runs)
    }
