"""Breaker: whether requests go to an upstream. Pure logic with an injected clock; one for each upstream.

Closed: requests pass and their outcomes are counted. Enough failures open it: no request passes. After a
while it allows one trial request at a time (half open): success closes the breaker, failure opens it for
twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

BUCKETS = 10  # buckets of a window: old counts expire one tenth at a time


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    failures: int = 5  # within `window_s`, that open it …
    ratio: float = 0.5  # … if they are at least this share of all requests in that time
    window_s: float = 30.0
    open_s: float = 5.0  # until a trial request; doubled each time it fails
    open_max_s: float = 60.0


class Pass(Enum):
    """Returned by `admit`; the request passes it back with its outcome."""

    NO = 0
    YES = 1
    TRIAL = 2


class Breaker:
    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._width_s = limits.window_s / BUCKETS
        self._numbers = [-1] * BUCKETS  # the number of each bucket since the clock's start
        self._ends = [0] * BUCKETS
        self._failures = [0] * BUCKETS
        self._open_until: float | None = None  # None: closed
        self._open_s = limits.open_s
        self._has_trial = False
        self.opened = 0  # count since the start

    @property
    def state(self) -> Literal["closed", "open", "half_open"]:
        if self._open_until is None:
            return "closed"
        return "half_open" if self._has_trial or self._clock() >= self._open_until else "open"

    @property
    def is_closed(self) -> bool:
        return self._open_until is None

    @property
    def has_trial(self) -> bool:
        """Whether a trial request is running."""
        return self._has_trial

    def may_admit(self) -> bool:
        """The result of `admit`, without starting a trial."""
        until = self._open_until
        return until is None or (not self._has_trial and self._clock() >= until)

    def admit(self) -> Pass:
        """Unless it is NO, `success`, `failure` or `abandon` must follow, with the same pass."""
        if self._open_until is None:
            return Pass.YES
        if not self.may_admit():
            return Pass.NO
        self._has_trial = True
        return Pass.TRIAL

    def success(self, given: Pass) -> None:
        """The upstream answered."""
        if given is Pass.TRIAL:
            self.reset()
        else:
            self._ends[self._bucket()] += 1

    def failure(self, given: Pass) -> None:
        """The upstream did not answer, or answered with a failure."""
        bucket = self._bucket()
        self._ends[bucket] += 1
        self._failures[bucket] += 1
        if given is Pass.TRIAL:
            self._open_s = min(self._open_s * 2, self._limits.open_max_s)
            self._open()
        elif self._open_until is None and self._has_failed():
            self._open()

    def abandon(self, given: Pass) -> None:
        """The request ended without an outcome: another request may be the trial."""
        if given is Pass.TRIAL:
            self._has_trial = False

    def trip(self) -> None:
        """Open regardless of counts: the upstream was found down."""
        self._open()

    def allow_trial(self) -> None:
        """The upstream was found up: the next request may be the trial."""
        if self._open_until is not None:
            self._open_until = self._clock()

    def reset(self) -> None:
        self._open_until = None
        self._has_trial = False
        self._open_s = self._limits.open_s
        self._numbers = [-1] * BUCKETS

    def retry_in_s(self) -> float:
        until = self._open_until
        return 0.0 if until is None else max(until - self._clock(), 0.0)

    def _open(self) -> None:
        if self._open_until is None:
            self.opened += 1
        self._open_until = self._clock() + self._open_s
        self._has_trial = False

    def _bucket(self) -> int:
        number = int(self._clock() / self._width_s)
        bucket = number % BUCKETS
        if self._numbers[bucket] != number:
            self._numbers[bucket] = number
            self._ends[bucket] = self._failures[bucket] = 0
        return bucket

    def _has_failed(self) -> bool:
        oldest = int(self._clock() / self._width_s) - BUCKETS
        counted = [bucket for bucket in range(BUCKETS) if self._numbers[bucket] > oldest]
        failures = sum(self._failures[bucket] for bucket in counted)
        ends = sum(self._ends[bucket] for bucket in counted)
        return failures >= self._limits.failures and failures >= self._limits.ratio * ends
