"""Fits the analytic model's constants to measured points.

Called by `held_out` and benchmarks/plan_accuracy.py; not needed at run time. Constants are positive by
construction (their logarithms are fitted) and tied to textbook values by priors. Large errors count linearly,
so that an engine run without CUDA graphs does not distort the constants of all.
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

from ridgeline.lab.perfmodel.constants import NAMES, Coefficients
from ridgeline.lab.perfmodel.deployment import Setting, Work
from ridgeline.lab.perfmodel.measured import MeasuredPoint
from ridgeline.lab.perfmodel.step_formula import ClosedLoop, tpot_seconds, ttft_seconds

Array = NDArray[np.float64]

FITTED_ENGINES = ("trtllm", "sglang", "vllm")
# Typical value, and its standard deviation as a logarithm: 0.2 is "well known", 1 is "an order of magnitude".
PRIORS: dict[str, tuple[float, float]] = {
    "read_linear": (0.85, 0.2),
    "read_experts": (0.6, 0.4),
    "read_cache": (0.75, 0.3),
    "int4_read": (1.3, 0.3),
    "linear_flops": (0.6, 0.2),
    "narrow_flops": (0.8, 0.2),
    "expert_flops": (0.5, 0.5),
    "attention_flops": (0.35, 0.5),
    "link": (0.6, 0.3),
    "layer_s": (35e-6, 0.7),
    "quantized_layer_s": (10e-6, 0.7),
    "latent_layer_s": (20e-6, 0.7),
    "recurrent_layer_s": (10e-6, 0.7),
    "expert_layer_s": (20e-6, 0.7),
    "reduce_hop_s": (3e-6, 0.7),
}
ENGINE_PRIORS: dict[str, tuple[float, float]] = {
    "sequence_s": (10e-6, 1.0),
    "prefill_layer_s": (100e-6, 1.0),
}
TTFT_PRIORS: dict[str, tuple[float, float]] = {"steps_waited": (1.0, 2.0), "room_share": (0.7, 1.5)}
TTFT_ENGINE_PRIORS: dict[str, tuple[float, float]] = {
    "first_s": (0.03, 3.0),
    "prefill_factor": (1.2, 1.5),
    "queue_share": (0.05, 3.0),
}
# Not fitted. Measured points have no pipeline stages; host time per step did not improve held-out errors.
SET = {"stage_hop_s": 10e-6, "step_s": 0.0}

NOISE = 0.1  # errors below this (a logarithm) count quadratically, larger ones linearly
TTFT_NOISE = 0.3


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
    """Logarithms of the constants that TPOT needs, and of those that only TTFT needs."""

    tpot: Array  # TPOT_NAMES
    ttft: Array  # TTFT_NAMES

    def coefficients(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Shared ones, and each engine's."""
        values = {name: math.exp(value) for name, value in zip(TPOT_NAMES, self.tpot, strict=True)}
        values |= {name: math.exp(value) for name, value in zip(TTFT_NAMES, self.ttft, strict=True)}
        shared = SET | {name: values[name] for name in NAMES if name in values}
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
    return {**shared, **each}


TPOT_PRIORS = _all_priors(PRIORS, ENGINE_PRIORS)
TPOT_NAMES = tuple(TPOT_PRIORS)
ALL_TTFT_PRIORS = _all_priors(TTFT_PRIORS, TTFT_ENGINE_PRIORS)
TTFT_NAMES = tuple(ALL_TTFT_PRIORS)


def columns(points: Sequence[MeasuredPoint]) -> Points:
    """Repeated measurements count once together, and every deployment counts equally."""
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
    """Starts from the constants of `start`, if given. Without `ttft`, its constants stay unchanged."""
    tpot_start, ttft_start = (
        (_moments(TPOT_PRIORS)[0], _moments(ALL_TTFT_PRIORS)[0])
        if start is None
        else (start.tpot, start.ttft)
    )

    def tpot_model(logs: Array) -> Array:
        return cast(Array, tpot_seconds(points.loop, _constants(logs, None, points)))

    tpot = _solve(tpot_model, points.tpot_s, points.weights, TPOT_PRIORS, NOISE, tpot_start)

    def ttft_model(logs: Array) -> Array:
        return cast(Array, ttft_seconds(points.loop, _constants(tpot, logs, points)))

    if not ttft:
        return Fit(tpot, ttft_start)
    return Fit(
        tpot, _solve(ttft_model, points.ttft_s, points.weights, ALL_TTFT_PRIORS, TTFT_NOISE, ttft_start)
    )


def predict(fitted: Fit, points: Points) -> tuple[Array, Array]:
    """TPOT and TTFT in seconds."""
    constants = _constants(fitted.tpot, fitted.ttft, points)
    tpot = cast(Array, tpot_seconds(points.loop, constants))
    return tpot, cast(Array, ttft_seconds(points.loop, constants))


# ---- fitting ----


def _solve(
    model: Callable[[Array], Array],
    measured: Array,
    weights: Array,
    priors: Mapping[str, tuple[float, float]],
    noise: float,
    start: Array,
) -> Array:
    """Robust least squares of logarithms, with the priors as further measurements."""
    mean, spread = _moments(priors)
    truth, count = np.log(measured), len(measured)

    def residuals(logs: Array) -> Array:
        errors = (np.log(model(logs)) - truth) / noise
        return np.concatenate([weights * _softened(errors), (logs - mean) / spread])

    def jacobian(logs: Array) -> Array:
        base = np.log(model(logs))
        slope = weights * _slope((base - truth) / noise) / noise
        matrix = np.zeros((count + len(logs), len(logs)))
        for column in range(len(logs)):
            moved = logs.copy()
            moved[column] += 1e-5
            matrix[:count, column] = slope * (np.log(model(moved)) - base) / 1e-5
        matrix[count + np.arange(len(logs)), np.arange(len(logs))] = 1 / spread
        return matrix

    found = least_squares(residuals, start, jac=jacobian, method="lm", max_nfev=60, xtol=1e-6, ftol=1e-6)
    return cast(Array, found.x)


def _softened(x: Array) -> Array:
    """Its square grows as |x| for large x."""
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
    """Constants as columns: shared ones as numbers, engine-specific ones by each point's engine."""
    logs = dict(zip(TPOT_NAMES, tpot, strict=True))
    if ttft is not None:
        logs |= dict(zip(TTFT_NAMES, ttft, strict=True))
    values: dict[str, Any] = dict(SET)
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
    """One dataclass of arrays from many dataclasses of numbers, recursively."""
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
