"""The forecast behind admission: how many KV blocks will the running sequences need at their worst moment?

A sequence grows by a token per step and gives everything back when it ends, so the worst moment is the last
step of one of them. Lengths are learned from recent answers. Called by the scheduler; pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Claim(NamedTuple):
    """What one sequence will hold alone: `own_tokens` in the coming step, `growth` more in its last one."""

    own_tokens: int
    growth: int


def peak_blocks(claims: Iterable[Claim], block_size: int, shared_blocks: int = 0) -> int:
    """The most blocks held at once until all claims have ended; shared blocks are held throughout.

    Claims are taken from the longest-lived to the shortest, so that those taken so far are exactly those
    alive in the last step of the newest one. Rounding up to blocks is exact: only the remainder of a claim's
    tokens matters for it, and there are no more than block_size different ones.
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
    """The lengths of recent answers, and from them a careful guess for an answer still being written."""

    def __init__(
        self, window: int = 256, quantile: float = 0.9, evidence: int = 16, cold_tokens: int = 1024
    ) -> None:
        self._quantile = quantile
        self._evidence = evidence  # fewer answers than this teach nothing
        self._cold_tokens = cold_tokens  # the guess until then
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []

    def record(self, num_output: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_right(self._sorted, self._recent[0]) - 1]
        self._recent.append(num_output)
        insort(self._sorted, num_output)

    def expected_left(self, num_output: int, most: int) -> int:
        """Tokens an answer of `num_output` so far will still get; at least 1, at most `most`.

        Of the recent answers that were longer, the given quantile. An answer longer than all of them is
        expected to double.
        """
        if len(self._sorted) < self._evidence:
            total = max(self._cold_tokens, 2 * num_output)
        else:
            shorter = bisect_right(self._sorted, num_output)
            longer = len(self._sorted) - shorter
            total = self._sorted[shorter + int(self._quantile * longer)] if longer else 2 * num_output
        return max(1, min(most, total - num_output))
