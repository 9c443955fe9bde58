"""Seconds to wait before a retry: our own backoff, and the upstream's Retry-After."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ridgeline.proxy.answer import UpstreamAnswer

LONGEST_S = 3600.0  # upper bound for an upstream's Retry-After


def backoff_s(first_ms: float, longest_ms: float, retries: int, rng: random.Random) -> float:
    """The wait before retry number `retries` + 1: doubled each time up to a bound, times 0.8 to 1.2."""
    base_ms = min(first_ms * 2.0**retries, longest_ms)
    return base_ms / 1e3 * rng.uniform(0.8, 1.2)


def retry_after_s(answer: UpstreamAnswer, now: datetime | None = None) -> float | None:
    """From retry-after-ms, or from Retry-After in seconds or as a date; None if absent."""
    text = answer.header(b"retry-after-ms")
    if text is not None and (seconds := _number(text)) is not None:
        return min(seconds / 1e3, LONGEST_S)
    text = answer.header(b"retry-after")
    if text is None:
        return None
    if (seconds := _number(text)) is not None:
        return min(seconds, LONGEST_S)
    try:
        at = parsedate_to_datetime(text.decode("latin-1"))
    except (ValueError, IndexError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max((at - (now or datetime.now(UTC))).total_seconds(), 0.0), LONGEST_S)


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
