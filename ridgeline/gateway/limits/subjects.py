"""The subjects of a request, whose limits it counts towards: its key, its team, its model."""

from __future__ import annotations

from ridgeline.gateway.catalog import PublicModel
from ridgeline.gateway.limits.limiter_types import NO_LIMITS, Limiter, Reservation, Subject
from ridgeline.gateway.tenants.keys import Key, Team


def subjects_of(key: Key, team: Team | None, model: PublicModel | None = None) -> list[Subject]:
    subjects = [Subject("key", key.id, key.limits)]
    if team is not None:
        subjects.append(Subject("team", team.id, team.limits))
    if model is not None and model.limits != NO_LIMITS:
        subjects.append(Subject("model", model.config.name, model.limits))
    return subjects


async def reserve_request(limiter: Limiter, key: Key, team: Team | None) -> Reservation:
    """For a request without tokens: counts one request, and one concurrent request."""
    return await limiter.reserve(subjects_of(key, team), 0, 0, when_unknown=key.when_limits_unknown)
