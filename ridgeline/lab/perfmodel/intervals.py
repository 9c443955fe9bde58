"""80 % intervals around an analytic prediction, and the ways in which a deployment differs from all measured
ones.

Half-widths are quantiles of held-out errors (see docs/planner-accuracy.md): deployments that no constant was
fitted on. Inside the fitted range they apply unchanged; outside they widen with the distance, and `unlike`
says why. Read by `analytic` and the planner; never changes the prediction itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.lab.perfmodel.constants import Fitted, Range, shipped
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.prediction import Interval

COVERAGE = 0.8
# A doubling beyond the fitted range, or a kind never measured, widens by this share.
WIDENING = 0.15
# The fitted points do not include ridgeline: its constants come from a few measured cases.
OWN_ENGINE_WIDENING = 0.5

Description = tuple[dict[str, float], dict[str, str]]

WORDS = {
    "batch": "{} requests at once",
    "isl": "prompts of {} tokens",
    "osl": "outputs of {} tokens",
    "gpus": "{} chips together",
    "layers": "{} layers",
    "active": "{} active parameters",
    "memory_rate": "{} bytes/s of memory",
}


def interval(metric: str, mid: float, deployment: Deployment, batch: float, isl: int, osl: int) -> Interval:
    constants = shipped()
    widths = constants.tpot if metric == "tpot" else constants.ttft
    width = widths.moe if deployment.shape.is_mixture else widths.dense
    width *= widening(describe(deployment, batch, isl, osl), constants.fitted)
    if deployment.backend == "ridgeline":
        width *= 1 + OWN_ENGINE_WIDENING
    return Interval(mid * math.exp(-width), mid, mid * math.exp(width), COVERAGE)


def widening(described: Description, fitted: Fitted) -> float:
    """Factor of the half-width, at least 1."""
    numbers, names = described
    distance = 0.0
    for name, value in numbers.items():
        known = fitted.numbers[name]
        if not known.low <= value <= known.high:
            distance += abs(math.log2(value / (known.low if value < known.low else known.high)))
    distance += sum(value not in fitted.names[name] for name, value in names.items())
    return 1 + WIDENING * distance


def unlike(deployment: Deployment, batch: float, isl: int, osl: int) -> list[str]:
    """What lies outside the fitted range, for a prediction's caveats."""
    fitted = shipped().fitted
    numbers, names = describe(deployment, batch, isl, osl)
    found = []
    for name, value in numbers.items():
        known = fitted.numbers[name]
        if not 0.99 * known.low <= value <= 1.01 * known.high:  # ends are stored with four digits
            said = WORDS[name].format(_figure(value))
            found.append(f"{said} (measured were {_figure(known.low)} to {_figure(known.high)})")
    for name, kind in names.items():
        if kind not in fitted.names[name]:
            found.append(f"{name} {kind} (measured were {', '.join(fitted.names[name])})")
    if deployment.backend == "ridgeline":
        found.append("constants of this engine are from a few measured cases, on one GPU and one CPU")
    return found


def _figure(value: float) -> str:
    return f"{value / 1e9:,.4g} billion" if value >= 1e8 else f"{value:,.0f}"


def describe(deployment: Deployment, batch: float, isl: int, osl: int) -> Description:
    """The numbers and kinds by which deployments are compared."""
    numbers = {
        "batch": max(float(batch), 1.0),
        "isl": float(isl),
        "osl": float(osl),
        "gpus": float(deployment.gpus),
        "layers": float(len(deployment.shape.layers)),
        "active": float(deployment.shape.active_parameters),
        "memory_rate": deployment.chip.bytes_per_s,
    }
    kinds = {
        "attention": "+".join(sorted({type(kind).__name__ for kind, _ in deployment.mixers})),
        "arithmetic": deployment.chip.unit(deployment.kept.linear),
    }
    return numbers, kinds


def range_of(described: Sequence[Description]) -> Fitted:
    """The minimum and maximum of each number, and every kind."""
    numbers = {name: [numbers[name] for numbers, _ in described] for name in described[0][0]}
    kinds = {name: {names[name] for _, names in described} for name in described[0][1]}
    return Fitted(
        {name: Range(min(values), max(values)) for name, values in numbers.items()},
        {name: sorted(values) for name, values in kinds.items()},
    )


def joined(ranges: Sequence[Fitted]) -> Fitted:
    return Fitted(
        {
            name: Range(
                min(one.numbers[name].low for one in ranges), max(one.numbers[name].high for one in ranges)
            )
            for name in ranges[0].numbers
        },
        {name: sorted({kind for one in ranges for kind in one.names[name]}) for name in ranges[0].names},
    )
