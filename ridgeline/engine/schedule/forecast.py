"""The forecast behind admission: the number of KV blocks the running sequences need at their peak.

A sequence grows by a token per step and releases its blocks when it ends, so the peak is at the last step of
one of them. Expected lengths come from recent answers. Called by the scheduler; pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Claim(NamedTuple):
    """Tokens one sequence will hold alone: `own_tokens` in the next step, `growth` more in its last one."""

    own_tokens: int
    growth: int


def peak_blocks(claims: Iterable[Claim], block_size: int, shared_blocks: int = 0) -> int:
    """The peak number of held blocks until all claims have ended; shared blocks are held throughout.

    Claims are added from the longest-lived to the shortest, so those added so far are exactly those alive in
    the last step of the newest one. Rounding up to blocks is exact: only the remainder of a claim's tokens
    matters for it, and there are at most block_size different remainders.
    """
    whole_blocks = peak = 0
    remainders = [0] * block_size
    longest_first = sorted(claims, key=lambda claim: -claim.growth)
    for alive, (own_tokens, growth) in enumerate(longest_first, start=1):
        whole, remainder = divmod(own_tokens, block_size)
        whole_blocks += whole
        remainders[remainder] += 1
        grown, rest = divmod(growth, block_size)
        begun = alive - remainders[0] if rest == 0 else alive + sum(remainders[block_size - rest + 1 :])
        peak = max(peak, whole_blocks + alive * grown + begun)
    return peak + shared_blocks


class OutputLengths:
    """The lengths of recent answers, used to predict the length of an answer in progress."""

    def __init__(
        self, window: int = 256, quantile: float = 0.9, evidence: int = 16, cold_tokens: int = 1024
    ) -> None:
        self._quantile = quantile
        self._evidence = evidence  # with fewer answers than this, cold_tokens is used
        self._cold_tokens = cold_tokens  # the prediction until then
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []

    def record(self, num_output: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_right(self._sorted, self._recent[0]) - 1]
        self._recent.append(num_output)
        insort(self._sorted, num_output)

    def expected_left(self, num_output: int, most: int) -> int:
        """Tokens still expected for an answer that has `num_output`; at least 1, at most `most`.

        The given quantile of the recent answers that were longer. An answer longer than all of them is
        expected to double.
        """
        if len(self._sorted) < self._evidence:
            total = max(self._cold_tokens, 2 * num_output)
        else:
            shorter = bisect_right(self._sorted, num_output)
            longer = len(self._sorted) - shorter
            total = self._sorted[shorter + int(self._quantile * longer)] if longer else 2 * num_output
        return max(1, min(most, total - num_output))
