"""LossBudget: bounds the time that a drafter that computes may lose.

A plain step pays in a hundredth of its time. A step with guesses pays in what it saved, or takes out what it
lost: drafting, reading and verifying count alike. What is lost in all is at most a hundredth of the time of
plain steps, what was saved before, and the excess of one ask over what it was expected to take.
"""

from __future__ import annotations

import math

SHARE = 0.01  # of the time of plain steps
MOST_SAVED = 256  # plain steps whose time is kept of what was saved: a drafter may have become worse


class LossBudget:
    def __init__(self) -> None:
        self.left_s = 0.0
        self._for_look_s = 0.0  # paid in by plain steps since the last look
        self._most_s = math.inf

    def pay_in(self, seconds: float) -> None:
        """seconds: of a step without guesses, for which the drafter did nothing"""
        self._for_look_s += SHARE * seconds
        self.settle(SHARE * seconds)

    def settle(self, saved_s: float) -> None:
        """saved_s: what a step saved against plain ones; negative if it lost"""
        self.left_s = min(self.left_s + saved_s, max(self.left_s, self._most_s))

    def limit(self, plain_s: float) -> None:
        """plain_s: the time of a plain step"""
        self._most_s = MOST_SAVED * plain_s

    def affords(self, cost_s: float) -> bool:
        return self.left_s >= cost_s

    def affords_look(self, cost_s: float) -> bool:
        """A look is an ask that is not expected to pay. Savings are not spent on looks in a row."""
        return min(self.left_s, self._for_look_s) >= cost_s

    def looked(self) -> None:
        self._for_look_s = 0.0
