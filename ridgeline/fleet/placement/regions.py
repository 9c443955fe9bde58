"""Regions: how far one is from another, and which of them residency rules allow.

Used by the placement of replicas and by routers. A rule is a region's name, with * for parts of it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

UNKNOWN_MS = 150.0  # between two regions whose latency is not given
Latencies = Mapping[str, Mapping[str, float]]  # place → region → ms
Rules = tuple[tuple[str, ...], ...]  # each of them must allow a region; an empty one allows all


def between(latency_ms: Latencies, place: str, region: str, unknown_ms: float = UNKNOWN_MS) -> float:
    """Milliseconds from a place to a region; given in one direction, it holds in both."""
    if place == region:
        return latency_ms.get(place, {}).get(region, 0.0)
    found = latency_ms.get(place, {}).get(region)
    if found is None:
        found = latency_ms.get(region, {}).get(place)
    return unknown_ms if found is None else found


def allows(rule: Sequence[str], region: str) -> bool:
    """A replica without a region satisfies no rule: where it runs is not known."""
    return not rule or (bool(region) and any(fnmatch.fnmatchcase(region, one) for one in rule))


def with_rule(rules: Rules, rule: tuple[str, ...]) -> Rules:
    return (*rules, rule) if rule and rule not in rules else rules


def all_allow(rules: Collection[Sequence[str]], region: str) -> bool:
    return all(allows(rule, region) for rule in rules)
