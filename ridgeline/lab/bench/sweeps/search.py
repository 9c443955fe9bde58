"""Search: chooses the next load of a sweep. Doubles until a load is too high, then bisects. Pure logic.

It is told whether each load was sustained, and asked for the next. Returns None when the border is known
precisely enough or the limits of the search are reached; `reason` says which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Search:
    """least, most: loads outside are not tried. precision: stop when the two loads around the border differ
    by at most this share. is_whole: loads are integers (concurrency).
    """

    start: float
    least: float
    most: float
    factor: float = 2.0
    precision: float = 0.1
    is_whole: bool = False
    carried: dict[float, bool] = field(default_factory=dict)
    reason: str = ""

    def tell(self, load: float, is_carried: bool) -> None:
        self.carried[load] = is_carried

    @property
    def border(self) -> tuple[float | None, float | None]:
        """The largest sustained load with no failed load below it, and the smallest failed load."""
        high = min((load for load, ok in self.carried.items() if not ok), default=None)
        below = [load for load, ok in self.carried.items() if ok and (high is None or load < high)]
        return max(below, default=None), high

    def next(self) -> float | None:
        low, high = self.border
        if low is None and high is None:
            return self._rounded(self.start)
        if high is None:
            assert low is not None
            return self._further(low, min(low * self.factor, self.most), f"the maximum load: {self.most:g}")
        if low is None:
            return self._further(
                high, max(high / self.factor, self.least), f"the minimum load: {self.least:g}"
            )
        is_close = high - low <= 1 if self.is_whole else False
        middle = self._rounded(math.sqrt(low * high))
        if is_close or high / low <= 1 + self.precision or middle in self.carried or not low < middle < high:
            self.reason = f"the border lies between {low:g} and {high:g}"
            return None
        return middle

    def _further(self, last: float, load: float, reason: str) -> float | None:
        load = self._rounded(load)
        if load == last or load in self.carried:
            self.reason = f"reached {reason}"
            return None
        return load

    def _rounded(self, load: float) -> float:
        """To three digits, or an integer: folders are named by it."""
        return float(max(round(load), 1)) if self.is_whole else float(f"{load:.3g}")
