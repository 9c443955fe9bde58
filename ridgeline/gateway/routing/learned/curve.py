"""The cost–quality curve: the quality that a method of choosing models reaches at each cost.

A method chooses the model with the best `chance - price * cost`. The price of quality runs from infinite
(always the cheapest) to 0, and the points on the way are the method's curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.learned.classifier import Floats
from ridgeline.gateway.routing.learned.neighbours import Outcomes, Scores

UPPER_END = (0.90, 0.92, 0.94, 0.95, 0.96, 0.98)
STEPS = 400  # prices to try with more than two models


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in order of cost. gap: 0 is the cheapest model's quality, 1 the strongest's.

    cost: 0 is the cheapest model's, 1 the strongest's. prices: at which each point is chosen.
    """

    cost: Floats
    gap: Floats
    prices: Floats

    def cost_at(self, gap: float) -> float:
        """The least cost that reaches the quality. Always the strongest model reaches it."""
        reached = self.gap >= gap - 1e-12
        return float(self.cost[int(reached.argmax())]) if reached.any() else 1.0

    def price_at(self, gap: float) -> float:
        reached = self.gap >= gap - 1e-12
        return float(self.prices[int(reached.argmax())]) if reached.any() else float(self.prices[-1])

    def gap_at(self, cost: float) -> float:
        return float(np.interp(cost, self.cost, self.gap))

    @property
    def area(self) -> float:
        """Mean quality over all costs: 0.5 is chance."""
        return float(np.trapezoid(self.gap, self.cost))


def curve(
    scores: Scores, outcomes: Outcomes, costs: Floats, weights: npt.NDArray[np.float64] | None = None
) -> Curve:
    """scores, outcomes, costs: [examples, models], models from the cheapest to the strongest.

    weights: how often each example counts, for the bootstrap.
    """
    counts = np.ones(len(scores)) if weights is None else weights
    total = counts.sum()
    weak, strong = (float(counts @ outcomes[:, m]) / total for m in (0, -1))
    cheap, dear = (float(counts @ costs[:, m]) / total for m in (0, -1))
    if scores.shape[1] == 2:
        cost, quality, prices = _two_models(scores, outcomes, costs, counts / total)
    else:
        cost, quality, prices = _several(scores, outcomes, costs, counts / total)
    span = dear - cheap
    gain = strong - weak
    gap = (quality - weak) / gain if abs(gain) > 1e-12 else np.ones_like(quality)
    return Curve((cost - cheap) / span if span > 0 else cost - cheap, gap, prices)


def merit(scores: Scores, outcomes: Outcomes, costs: Floats) -> float:
    """The score for comparing methods: the area, and the savings beyond chance near the top.

    The middle of the curve dominates the area, but users want its upper end; a single point there is too
    noisy to choose by.
    """
    found = curve(scores, outcomes, costs)
    return found.area + sum(gap - found.cost_at(gap) for gap in UPPER_END) / len(UPPER_END)


def choices(scores: Scores, costs: Floats, price: float) -> npt.NDArray[np.intp]:
    """The model for each example at a price of quality; the cheapest if equal."""
    chosen: npt.NDArray[np.intp] = np.argmax(scores - price * costs, axis=1)
    return chosen


def _two_models(
    scores: Scores, outcomes: Outcomes, costs: Floats, shares: Floats
) -> tuple[Floats, Floats, Floats]:
    """Exact: examples go to the strong model in the order of its predicted gain per cost."""
    worth = (scores[:, 1] - scores[:, 0]) / (costs[:, 1] - costs[:, 0])
    order = np.argsort(-worth, kind="stable")
    spent = np.cumsum(shares[order] * (costs[order, 1] - costs[order, 0]))
    gained = np.cumsum(shares[order] * (outcomes[order, 1] - outcomes[order, 0]))
    cost = np.concatenate([[0.0], spent]) + shares @ costs[:, 0]
    quality = np.concatenate([[0.0], gained]) + shares @ outcomes[:, 0]
    ordered = worth[order]
    # Each price lies below the last example for the strong model: `>` then chooses exactly these.
    between = (ordered[:-1] + ordered[1:]) / 2
    prices = np.concatenate([[ordered[0] + 1e-6], between, [ordered[-1] - 1e-6]])
    return cost, quality, prices


def _several(
    scores: Scores, outcomes: Outcomes, costs: Floats, shares: Floats
) -> tuple[Floats, Floats, Floats]:
    worth = (scores[:, 1:] - scores[:, :1]) / np.maximum(costs[:, 1:] - costs[:, :1], 1e-12)
    prices = np.quantile(worth, np.linspace(1, 0, STEPS - 2))
    prices = np.concatenate([[prices[0] + 1.0], prices, [prices[-1] - 1.0]])
    rows = np.arange(len(scores))
    cost, quality = np.zeros(STEPS), np.zeros(STEPS)
    for number, price in enumerate(prices):
        chosen = choices(scores, costs, float(price))
        cost[number] = shares @ costs[rows, chosen]
        quality[number] = shares @ outcomes[rows, chosen]
    order = np.argsort(cost, kind="stable")
    return cost[order], quality[order], prices[order]
