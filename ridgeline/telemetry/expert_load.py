"""How evenly tokens fall on the experts of each layer, from the engine's counters.

The server asks the engine when /metrics is read and passes the counts here. The imbalance is that of the
tokens since the previous reading, so that a change of traffic shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ExpertCounts = Mapping[int, Sequence[int]]  # layer → for each of its experts, the tokens that chose it


class ExpertLoad:
    """The imbalance of each layer. Counters that have decreased belong to a new engine."""

    def __init__(self) -> None:
        self._last: ExpertCounts = {}
        self.imbalance: dict[int, float] = {}

    def observe(self, counts: ExpertCounts) -> None:
        for layer, tokens in counts.items():
            before = self._last.get(layer)
            if before is None or any(now < then for now, then in zip(tokens, before, strict=True)):
                before = [0] * len(tokens)
            value = imbalance([now - then for now, then in zip(tokens, before, strict=True)])
            if value is not None:
                self.imbalance[layer] = value
        self._last = counts


def imbalance(tokens: Sequence[int]) -> float | None:
    """Tokens of the busiest expert over the mean: 1 is even; with one busy expert, the number of experts.

    None if no token was counted.
    """
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else None
