"""Fits the analytic model's constants on measured points.

Called by `plan.held_out` and benchmarks/plan_accuracy.py; nothing at run time needs it. Constants are
positive by construction (their logarithms are fitted), tied to textbook values by priors, and each deployment
may be off as a whole by a factor of its own, so that an engine run without CUDA graphs does not bend the
constants of all. That factor is never used to predict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ridgeline.lab.plan.analytic import ClosedLoop, tpot_seconds, ttft_seconds
from ridgeline.lab.plan.constants import NAMES, Coefficients
from ridgeline.lab.plan.deployment import Setting, Work
from ridgeline.lab.plan.measured import MeasuredPoint

Array = NDArray[np.float64]

FITTED_ENGINES = ("trtllm", "sglang", "vllm")
# Typical value, and its standard deviation as a logarithm: 0.2 is "well known", 1 is "an order of magnitude".
PRIORS: dict[str, tuple[float, float]] = {
    "read_linear": (0.85, 0.2),
    "read_experts": (0.6, 0.4),
    "read_cache": (0.75, 0.3),
    "int4_read": (1.3, 0.3),
    "linear_flops": (0.6, 0.2),
    "fp8_flops": (0.8, 0.2),
    "fp4_flops": (0.6, 0.3),
    "expert_flops": (0.5, 0.5),
    "attention_flops": (0.35, 0.5),
    "link": (0.6, 0.3),
    "layer_s": (35e-6, 0.7),
    "quantized_layer_s": (10e-6, 0.7),
    "latent_layer_s": (20e-6, 0.7),
    "recurrent_layer_s": (10e-6, 0.7),
    "expert_layer_s": (20e-6, 0.7),
    "reduce_s": (8e-6, 0.5),
    "reduce_hop_s": (1e-6, 1.0),
    "exchange_s": (10e-6, 0.7),
}
ENGINE_PRIORS: dict[str, tuple[float, float]] = {
    "layer_factor": (1.0, 0.4),
    "step_s": (5e-4, 1.0),
    "sequence_s": (10e-6, 1.0),
    "prefill_layer_s": (100e-6, 1.0),
}
TTFT_PRIORS: dict[str, tuple[float, float]] = {"steps_waited": (1.0, 0.7), "room_share": (0.7, 0.5)}
TTFT_ENGINE_PRIORS: dict[str, tuple[float, float]] = {
    "first_s": (0.03, 1.0),
    "prefill_factor": (1.2, 0.5),
    "queue_share": (0.05, 1.0),
}
# All per-layer times of this engine are the shared ones: its factor is 1.
REFERENCE_ENGINE = "trtllm"
STAGE_HOP_S = 10e-6  # no measured point has pipeline stages

NOISE = 0.1  # errors below this (a logarithm) count by their square, larger ones by themselves
TTFT_NOISE = 0.3
OFFSET = 0.12  # the same for a deployment's own factor
OFFSET_WEIGHT = 1.5


@dataclass(frozen=True)
class Points:
    """Measured points as columns."""

    loop: ClosedLoop  # of arrays
    engines: NDArray[np.int64]
    groups: NDArray[np.int64]
    group_names: list[tuple[str, str, str, str]]
    weights: Array
    tpot_s: Array
    ttft_s: Array

    def where(self, chosen: NDArray[np.bool_]) -> Points:
        return Points(
            cast(ClosedLoop, _select(self.loop, chosen)),
            self.engines[chosen],
            self.groups[chosen],
            self.group_names,
            self.weights[chosen],
            self.tpot_s[chosen],
            self.ttft_s[chosen],
        )


@dataclass(frozen=True)
class Fit:
    """Logarithms of the constants by name ("layer_s", "step_s/vllm"), and of each group's own factor."""

    tpot: Array
    offsets: Array
    ttft: Array

    def coefficients(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Shared ones, and each engine's."""
        values = {name: math.exp(value) for name, value in zip(TPOT_NAMES, self.tpot, strict=True)}
        values |= {name: math.exp(value) for name, value in zip(TTFT_NAMES, self.ttft, strict=True)}
        values |= {f"layer_factor/{REFERENCE_ENGINE}": 1.0, "stage_hop_s": STAGE_HOP_S}
        shared = {name: values[name] for name in NAMES if name in values}
        engines = {
            engine: {
                name.partition("/")[0]: value for name, value in values.items() if name.endswith(f"/{engine}")
            }
            for engine in FITTED_ENGINES
        }
        return shared, engines


def _all_priors(
    shared: Mapping[str, tuple[float, float]], own: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    each = {f"{name}/{engine}": prior for engine in FITTED_ENGINES for name, prior in own.items()}
    each.pop(f"layer_factor/{REFERENCE_ENGINE}", None)
    return {**shared, **each}


TPOT_PRIORS = _all_priors(PRIORS, ENGINE_PRIORS)
TPOT_NAMES = tuple(TPOT_PRIORS)
ALL_TTFT_PRIORS = _all_priors(TTFT_PRIORS, TTFT_ENGINE_PRIORS)
TTFT_NAMES = tuple(ALL_TTFT_PRIORS)


def columns(points: Sequence[MeasuredPoint]) -> Points:
    """Repeated measurements count once together, and every deployment as much as any other."""
    names = sorted({point.group for point in points})
    group_of = {name: index for index, name in enumerate(names)}
    repeats = Counter(_identity(point) for point in points)
    sizes = Counter(point.group for point in points)
    weights = [repeats[_identity(point)] ** -0.5 * sizes[point.group] ** -0.5 for point in points]
    return Points(
        loop=cast(ClosedLoop, _stack([point.loop for point in points])),
        engines=np.array([FITTED_ENGINES.index(point.deployment.backend) for point in points]),
        groups=np.array([group_of[point.group] for point in points]),
        group_names=names,
        weights=np.array(weights),
        tpot_s=np.array([point.tpot_s for point in points]),
        ttft_s=np.array([point.ttft_s for point in points]),
    )


def fit(points: Points, start: Fit | None = None, *, ttft: bool = True) -> Fit:
    """From the constants of `start`, where there are some. Without `ttft`, its constants stay those."""
    tpot, offsets = _fit_tpot(points, start)
    first = _moments(ALL_TTFT_PRIORS)[0] if start is None else start.ttft
    return Fit(tpot, offsets, _fit_ttft(points, tpot, first) if ttft else first)


def predict(fitted: Fit, points: Points) -> tuple[Array, Array]:
    """TPOT and TTFT in seconds."""
    constants = _constants(fitted.tpot, fitted.ttft, points)
    tpot = cast(Array, tpot_seconds(points.loop, constants))
    return tpot, cast(Array, ttft_seconds(points.loop, constants))


# ---- the two fits ----


def _fit_tpot(points: Points, start: Fit | None) -> tuple[Array, Array]:
    mean, spread = _moments(TPOT_PRIORS)
    count, groups = len(mean), len(points.group_names)
    measured = np.log(points.tpot_s)
    rows = np.arange(len(measured))

    def model(logs: Array) -> Array:
        return np.log(cast(Array, tpot_seconds(points.loop, _constants(logs, None, points))))

    def residuals(x: Array) -> Array:
        errors = (model(x[:count]) + x[count:][points.groups] - measured) / NOISE
        own = OFFSET_WEIGHT * _softened(x[count:] / OFFSET)
        return np.concatenate([points.weights * _softened(errors), (x[:count] - mean) / spread, own])

    def jacobian(x: Array) -> Array:
        base = model(x[:count])
        slope = points.weights * _slope((base + x[count:][points.groups] - measured) / NOISE) / NOISE
        matrix = np.zeros((len(measured) + count + groups, count + groups))
        for column in range(count):
            moved = x[:count].copy()
            moved[column] += 1e-5
            matrix[: len(measured), column] = slope * (model(moved) - base) / 1e-5
        matrix[rows, count + points.groups] = slope
        matrix[len(measured) + np.arange(count), np.arange(count)] = 1 / spread
        own = np.arange(groups)
        matrix[len(measured) + count + own, count + own] = OFFSET_WEIGHT * _slope(x[count:] / OFFSET) / OFFSET
        return matrix

    first = np.concatenate([mean, np.zeros(groups)] if start is None else [start.tpot, start.offsets])
    found = _solve(residuals, jacobian, first)
    return found[:count], found[count:]


def _fit_ttft(points: Points, tpot: Array, first: Array) -> Array:
    mean, spread = _moments(ALL_TTFT_PRIORS)
    measured = np.log(points.ttft_s)

    def model(logs: Array) -> Array:
        return np.log(cast(Array, ttft_seconds(points.loop, _constants(tpot, logs, points))))

    def residuals(x: Array) -> Array:
        errors = points.weights * _softened((model(x) - measured) / TTFT_NOISE)
        return np.concatenate([errors, 0.3 * (x - mean) / spread])

    def jacobian(x: Array) -> Array:
        base = model(x)
        slope = points.weights * _slope((base - measured) / TTFT_NOISE) / TTFT_NOISE
        matrix = np.zeros((len(measured) + len(x), len(x)))
        for column in range(len(x)):
            moved = x.copy()
            moved[column] += 1e-5
            matrix[: len(measured), column] = slope * (model(moved) - base) / 1e-5
        matrix[len(measured) + np.arange(len(x)), np.arange(len(x))] = 0.3 / spread
        return matrix

    return _solve(residuals, jacobian, first)


def _solve(residuals: Callable[[Array], Array], jacobian: Callable[[Array], Array], first: Array) -> Array:
    found = least_squares(residuals, first, jac=jacobian, max_nfev=40, xtol=1e-6, ftol=1e-6)
    return cast(Array, found.x)


def _softened(x: Array) -> Array:
    """Whose square grows as |x| where x is large."""
    return cast(Array, np.sign(x) * np.sqrt(2 * (np.sqrt(1 + x * x) - 1)))


def _slope(x: Array) -> Array:
    small = np.abs(x) < 1e-6
    safe = np.where(small, 1.0, x)
    return np.where(small, 1.0, safe / np.sqrt(1 + safe * safe) / _softened(safe))


def _moments(priors: Mapping[str, tuple[float, float]]) -> tuple[Array, Array]:
    return np.log([value for value, _ in priors.values()]), np.array(
        [spread for _, spread in priors.values()]
    )


# ---- columns ----


def _constants(tpot: Array, ttft: Array | None, points: Points) -> Coefficients:
    """Constants as columns: shared ones as numbers, an engine's own by each point's engine."""
    logs = dict(zip(TPOT_NAMES, tpot, strict=True))
    if ttft is not None:
        logs |= dict(zip(TTFT_NAMES, ttft, strict=True))
    values: dict[str, Any] = {"stage_hop_s": STAGE_HOP_S}
    for name in NAMES:
        if name in logs:
            values[name] = math.exp(logs[name])
        elif any(f"{name}/{engine}" in logs for engine in FITTED_ENGINES):
            by_engine = np.exp([logs.get(f"{name}/{engine}", 0.0) for engine in FITTED_ENGINES])
            values[name] = by_engine[points.engines]
        else:
            values.setdefault(name, 0.0)
    return Coefficients(**values)


def _stack(rows: Sequence[Any]) -> Any:
    """One dataclass of arrays from many dataclasses of numbers; members that are dataclasses likewise."""
    first = rows[0]
    columns_of: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(row, field.name) for row in rows]
        nested = isinstance(values[0], Work | Setting)
        columns_of[field.name] = _stack(values) if nested else np.array(values, dtype=np.float64)
    return type(first)(**columns_of)


def _select(stacked: Any, chosen: NDArray[np.bool_]) -> Any:
    members = {field.name: getattr(stacked, field.name) for field in fields(stacked)}
    return type(stacked)(
        **{
            name: _select(value, chosen) if isinstance(value, Work | Setting) else value[chosen]
            for name, value in members.items()
        }
    )


def _identity(point: MeasuredPoint) -> tuple[object, ...]:
    return point.group, point.isl, point.osl, point.tpot_s
