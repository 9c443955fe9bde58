"""StepTimes: predicts how long a step of decodes takes, from the steps that were measured.

Two axes: the tokens that the step computes, and the KV tokens that it reads. For each number of tokens the
median of the last measurements counts, so that a disturbed step changes nothing; the time per KV token comes
from how measurements of the same number of tokens differ. Between measured numbers it interpolates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

KEPT = 9  # measurements of one number of tokens
FEW = 3
FRESH_STEPS = 4096  # older measurements count no more, fewer even earlier: the machine may have been busy
FIRST_TRIAL = 4  # tokens of the first step beyond plain ones
PRIOR_SLOPE = 0.1  # of the time of one token, for each further one, until it is measured
DEVICE_SLOPE = 0.005  # … on a GPU, where the weights' bytes bind up to some hundred tokens
DISTURBED = 3.0  # times as long as expected: a first step of its size compiled kernels or captured a graph
MOST_DOUBTS = 3  # steps of one size that are left out for that
FORGETTING = 0.99  # of the evidence for the time per KV token, with each step
EXACT_UP_TO = 32  # tokens; above, steps of similar sizes are measured together


def size_class(tokens: int) -> int:
    """Steps of one class count as equally large."""
    if tokens <= EXACT_UP_TO:
        return tokens
    width = 4 if tokens <= 64 else 16
    return -(-tokens // width) * width


class Measured:
    """The last steps of one size."""

    __slots__ = ("context", "newest", "steps", "typical_s")

    def __init__(self) -> None:
        self.steps: deque[tuple[float, int]] = deque(maxlen=KEPT)  # seconds and KV tokens
        self.newest = 0  # the number of the last one
        self.context = 0.0  # mean KV tokens
        self.typical_s = 0.0  # median; of few, the least: others were disturbed

    def add(self, seconds: float, context: int, number: int) -> None:
        self.steps.append((seconds, context))
        self.newest = number
        self.context = sum(read for _, read in self.steps) / len(self.steps)
        known = [each for each, _ in self.steps]
        self.typical_s = median(known) if len(known) > FEW else min(known)

    def seconds(self, context: int, per_kv_token: float) -> float:
        """As measured, and moved to this context; at most by half of it down or four times up."""
        moved = self.typical_s + per_kv_token * (context - self.context)
        return min(max(moved, self.typical_s / 2), 4 * self.typical_s)


class StepTimes:
    def __init__(self) -> None:
        self._measured: dict[int, Measured] = {}
        self._number = 0
        self.news = 0  # grows when a size was measured that was hardly known
        self._covariance = self._variance = 0.0
        self._doubts: dict[int, int] = {}  # by size
        self.prior_slope = PRIOR_SLOPE

    @property
    def num_measured(self) -> int:
        return self._number

    @property
    def per_kv_token_s(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance > 0 else 0.0

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """A step without prompts. context: KV tokens that it read."""
        self._number += 1
        size = size_class(tokens)
        measured = self._measured.get(size)
        if self._is_doubtful(size, measured, tokens, context, seconds):
            return
        if measured is None:
            measured = self._measured[size] = Measured()
        elif measured.steps:
            further, typical = context - measured.context, measured.typical_s
            if seconds < 2 * typical:  # else disturbed
                self._covariance = FORGETTING * self._covariance + further * (seconds - typical)
                self._variance = FORGETTING * self._variance + further * further
        measured.add(seconds, context, self._number)
        if len(measured.steps) <= FEW:
            self.news += 1

    def _is_doubtful(
        self, size: int, measured: Measured | None, tokens: int, context: int, seconds: float
    ) -> bool:
        if measured is not None and len(measured.steps) >= FEW:
            return False
        expected = self.seconds(tokens, context)
        if expected is None or seconds <= DISTURBED * expected or self._doubts.get(size, 0) == MOST_DOUBTS:
            return False
        self._doubts[size] = self._doubts.get(size, 0) + 1
        return True

    def knows(self, tokens: int) -> bool:
        found = self._measured.get(size_class(tokens))
        return found is not None and KEPT * (self._number - found.newest) < FRESH_STEPS * len(found.steps)

    def reach(self, rows: int) -> int:
        """The most tokens that a step of `rows` decodes may grow to: not far beyond what was measured."""
        largest = max((size for size in self._measured if self.knows(size)), default=0)
        return max(FIRST_TRIAL, 2 * max(largest, rows))

    def seconds(self, tokens: int, context: int) -> float | None:
        """None before anything was measured. Never less than for fewer tokens that were measured."""
        sizes = sorted(size for size in self._measured if self.knows(size))
        if not sizes:
            return None
        size, slope, prior = size_class(tokens), self.per_kv_token_s, self.prior_slope
        place = bisect_left(sizes, size)
        known = [(each, self._measured[each].seconds(context, slope)) for each in sizes]
        if place < len(sizes) and sizes[place] == size:
            return max(seconds for _, seconds in known[: place + 1])
        if place == 0:  # fewer tokens than ever: not much faster
            largest, seconds = known[0]
            return seconds * (1 + prior * (size - 1)) / (1 + prior * (largest - 1))
        below, below_s = known[place - 1][0], max(seconds for _, seconds in known[:place])
        if place < len(sizes):
            above, above_s = known[place]
            share = (size - below) / (above - below)
            return below_s + share * max(0.0, above_s - below_s)
        slope_s = below_s * prior / (1 + prior * (below - 1))
        if place > 1:  # beyond all that was measured, as the last of them
            before, before_s = known[place - 2]
            slope_s = max(slope_s, (below_s - before_s) / (below - before))
        return below_s + slope_s * (size - below)
