"""DraftLengths: how many guesses of each row a step verifies: the most tokens per second, expected.

Every further guess adds its chance of being right to the step's tokens and its time to the step. The chances
of a row only fall, so the best guesses of all rows are added one by one, and the number with the best rate
counts, not the first after which the rate falls: the time of a step is not smooth in its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ridgeline.engine.speculate.drafter import MOST_DRAFTS
from ridgeline.engine.speculate.step_times import StepTimes

WORTH = 1.03  # least expected gain
ALIKE = 20  # chances are compared in steps of 1/20: rows that differ by less get drafts of one length
REFRESH_STEPS = 16  # steps between two looks at the measured times
MOST_OF_A_STEP = 64  # drafts of all rows together
MOST_ON_A_DEVICE = 256  # … where a row of a product costs little


def most_of_a_row(rows: int) -> int:
    """Guesses that are made for each of `rows` decodes: of many rows only the first ones have a chance."""
    return min(MOST_DRAFTS, 4 * MOST_OF_A_STEP // max(1, rows)) or 1


class Choice(NamedTuple):
    """lengths: of each row's draft; gain: expected tokens per second, as a multiple of a step without;
    cost: the step's time, likewise"""

    lengths: list[int]
    gain: float
    cost: float = 1.0


class StepCost(NamedTuple):
    """Times of steps with a number of decodes, as they were known a short time ago."""

    until: int  # the measurement after which it is looked at again
    news: int
    context: int
    plain_s: float | None
    multiples: list[float]

    def serves(self, times: StepTimes, context: int) -> bool:
        is_fresh = times.num_measured < self.until and times.news == self.news
        return is_fresh and self.context <= 2 * context <= 4 * self.context


class DraftLengths:
    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.most_of_a_step = MOST_OF_A_STEP
        self._costs: dict[int, StepCost] = {}
        self._turn = 0

    def costs(self, rows: int, context: int) -> list[float]:
        """The time of a step with 0, 1, 2 … drafts beside `rows` decodes, as a multiple of one without."""
        return self._cost(rows, context).multiples

    def plain_s(self, rows: int, context: int) -> float | None:
        """The time of a step of `rows` decodes without drafts; None: not known yet."""
        return self._cost(rows, context).plain_s

    def _cost(self, rows: int, context: int) -> StepCost:
        known = self._costs.get(rows)
        if known is not None and known.serves(self._times, context):
            return known
        plain = self._times.seconds(rows, context)
        reach = self._times.reach(rows) - rows
        most = 0 if plain is None else min(MOST_DRAFTS * rows, self.most_of_a_step, reach)
        times = [self._times.seconds(rows + more, context) or 1.0 for more in range(most + 1)]
        multiples = [seconds / times[0] for seconds in times]
        cost = StepCost(self._times.num_measured + REFRESH_STEPS, self._times.news, context, plain, multiples)
        self._costs[rows] = cost
        return cost

    def may_pay(self, rows: int, context: int) -> bool:
        """Whether any draft would pay if every guess were right."""
        costs = self.costs(rows, context)
        return any((rows + more) >= WORTH * rows * cost for more, cost in enumerate(costs) if more)

    def choose(
        self, survivals: list[list[float]], rows: int, context: int, drafting: Sequence[float] = ()
    ) -> Choice:
        """survivals: for each row with a draft, the chance of each guess; rows: of the step in all.

        drafting: the time of drafts of 1, 2, 3 … guesses, as a multiple of a plain step's; empty: they exist
        """
        costs = self.costs(rows, context)
        chances = self._best_first(survivals)
        best, best_gain, best_cost, expected = 0, 1.0, 1.0, float(rows)
        lengths = [0] * len(survivals)
        longest = 0
        for more, (row, chance) in enumerate(chances[: len(costs) - 1], start=1):
            expected += chance
            cost = costs[more]
            if drafting:
                lengths[row] += 1
                longest = max(longest, lengths[row])
                cost += drafting[longest - 1]
            gain = expected / rows / cost
            if gain > best_gain:
                best, best_gain, best_cost = more, gain, cost
        lengths = [0] * len(survivals)
        if best_gain >= WORTH:
            for row, _ in chances[:best]:
                lengths[row] += 1
        return Choice(lengths, best_gain, best_cost)

    def _best_first(self, survivals: list[list[float]]) -> list[tuple[int, float]]:
        """(row, chance) of all guesses, best first; of equal ones those nearer to the end of their text."""
        self._turn += 1  # of equal rows another one comes first in each step
        first = self._turn % max(1, len(survivals))
        turns = [*range(first, len(survivals)), *range(first)]
        by_chance: list[list[tuple[int, float]]] = [[] for _ in range(ALIKE + 1)]
        for place in range(max(map(len, survivals), default=0)):
            for row in turns:
                each = survivals[row]
                if place < len(each):
                    by_chance[ALIKE - round(ALIKE * each[place])].append((row, each[place]))
        return list(chain.from_iterable(by_chance))
