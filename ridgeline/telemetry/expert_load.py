"""How evenly tokens fall on the experts of each layer, from the engine's counters.

The server asks the engine when /metrics is read and passes the counts here. The imbalance is that of an
interval of at least 15 s, so that a second scraper does not change what the first one reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

ExpertCounts = Mapping[int, Sequence[int]]  # layer → for each of its experts, the tokens that chose it
INTERVAL_S = 15.0


class ExpertLoad:
    """`imbalance`: of each layer, in the last complete interval; a layer without tokens in it is absent.

    An interval ends with the first reading INTERVAL_S after its start. The first one begins with the engine
    and ends with the first reading. Counters that have decreased belong to a new engine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: ExpertCounts | None = None  # the counters at the interval's start
        self._started = 0.0
        self._complete: dict[int, float] = {}
        self.imbalance: dict[int, float] = {}

    def observe(self, counts: ExpertCounts | None) -> None:
        """The engine's counters now; None: it did not answer, and no imbalance is known."""
        if counts is None:
            self.imbalance = {}
            return
        if self._start is None or _is_new_engine(counts, self._start):
            self._end_interval(counts, {})
        elif self._clock() - self._started >= INTERVAL_S:
            self._end_interval(counts, self._start)
        self.imbalance = self._complete

    def _end_interval(self, counts: ExpertCounts, start: ExpertCounts) -> None:
        self._complete = {}
        for layer, tokens in counts.items():
            before = start.get(layer, [0] * len(tokens))
            value = imbalance([now - then for now, then in zip(tokens, before, strict=True)])
            if value is not None:
                self._complete[layer] = value
        self._start, self._started = counts, self._clock()


def _is_new_engine(counts: ExpertCounts, start: ExpertCounts) -> bool:
    return any(
        now < then
        for layer, before in start.items()
        for now, then in zip(counts.get(layer, ()), before, strict=False)
    )


def imbalance(tokens: Sequence[int]) -> float | None:
    """Tokens of the busiest expert over the mean: 1 is even; with one busy expert, the number of experts.

    None if no token was counted.
    """
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else None
