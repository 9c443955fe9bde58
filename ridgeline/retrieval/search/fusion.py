"""Reciprocal rank fusion: ranks are added up, never scores, which have different scales. Pure."""

from __future__ import annotations

from collections.abc import Sequence

RANK_OFFSET = 60  # k of the method: how little the first ranks differ


def fused(rankings: Sequence[tuple[float, Sequence[str]]]) -> list[tuple[str, float]]:
    """Ids by the sum of weight / (60 + rank) over rankings of (weight, ids), best first, ties by id.

    Scores are divided by the sum that a first place everywhere would give: between 0 and 1.
    """
    most = sum(weight for weight, _ in rankings) / (RANK_OFFSET + 1)
    totals: dict[str, float] = {}
    for weight, ids in rankings:
        for rank, id in enumerate(ids, start=1):
            totals[id] = totals.get(id, 0.0) + weight / (RANK_OFFSET + rank)
    return sorted(((id, total / most) for id, total in totals.items()), key=lambda one: (-one[1], one[0]))
