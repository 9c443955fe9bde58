"""Compares the rates of two runs: request by request where that is meaningful, otherwise by segments of the
runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ridgeline.lab.bench.compare.difference import Difference, Side, Spread, drawn_row, measured
from ridgeline.lab.bench.figures.bootstrap import Floats, block_weights, student_t
from ridgeline.lab.bench.figures.metrics import Summary, meets
from ridgeline.lab.bench.figures.rates import request_share
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.window import Window

STRETCHES = 12  # segments of the steady window; their rates give the spread
HIGHER_IS_BETTER = ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s", "goodput_per_s")


def rate_rows(
    a: Side,
    b: Side,
    pairs: Sequence[tuple[RequestRecord, RequestRecord]],
    seed: int,
    resamples: int,
) -> list[Difference]:
    """pairs: requests that both runs sent, or none."""
    names = [name for name in HIGHER_IS_BETTER if name in a.summary.metrics and name in b.summary.metrics]
    shared = Window(
        max(a.summary.window.start, b.summary.window.start), min(a.summary.window.end, b.summary.window.end)
    )
    if pairs and a.summary.mode == "open" and shared.seconds > 0:
        return [_by_requests(name, a, b, pairs, shared, seed, resamples) for name in names]
    return [row for name in names if (row := _by_stretches(name, a, b)) is not None]


def _by_requests(
    name: str,
    a: Side,
    b: Side,
    pairs: Sequence[tuple[RequestRecord, RequestRecord]],
    window: Window,
    seed: int,
    resamples: int,
) -> Difference:
    """Over the window that is steady in both runs. Both have the same due requests; only those that move into
    or out of the window differ. They are few, and their spread gives the interval.
    """
    left = _amounts(name, [x for x, _ in pairs], a.summary, window)
    right = _amounts(name, [y for _, y in pairs], b.summary, window)
    drawn_a, drawn_b = [], []
    for weights in block_weights(len(pairs), resamples, seed):
        scale = len(pairs) / int(weights.sum()) / window.seconds
        drawn_a.append(float(weights @ left) * scale)
        drawn_b.append(float(weights @ right) * scale)
    metric = a.summary.metrics[name]
    return drawn_row(
        name,
        metric.unit,
        metric.formula,
        float(left.sum()) / window.seconds,
        float(right.sum()) / window.seconds,
        np.asarray(drawn_a),
        np.asarray(drawn_b),
        (len(pairs), len(pairs)),
        lower_is_better=False,
    )


def _by_stretches(name: str, a: Side, b: Side) -> Difference | None:
    """Batch means: segments of many requests each, treated as small runs (Welch's t)."""
    if a.summary.window.seconds <= 0 or b.summary.window.seconds <= 0:
        return None
    left, right = _stretches(name, a), _stretches(name, b)
    mean_a, mean_b = float(left.mean()), float(right.mean())
    error_a, error_b = (float(rates.var(ddof=1)) / STRETCHES for rates in (left, right))
    error = math.sqrt(error_a + error_b)
    freedom = (error_a + error_b) ** 2 / ((error_a**2 + error_b**2) / (STRETCHES - 1)) if error else math.inf
    reach = student_t(freedom) * error
    difference = Spread(mean_b - mean_a, mean_b - mean_a - reach, mean_b - mean_a + reach)
    ratio = None
    if mean_a > 0 and mean_b > 0:
        relative = math.sqrt(error_a / mean_a**2 + error_b / mean_b**2)
        factor = math.exp(student_t(freedom) * relative)
        ratio = Spread(mean_b / mean_a, mean_b / mean_a / factor, mean_b / mean_a * factor)
    metric = a.summary.metrics[name]
    samples = (STRETCHES, STRETCHES)
    return Difference(name, metric.unit, metric.formula, mean_a, mean_b, difference, ratio, False, samples)


def _stretches(name: str, side: Side) -> Floats:
    """The rate in each segment of the window; their mean is the run's figure."""
    window = side.summary.window
    edges = np.linspace(window.start, window.end, STRETCHES + 1)
    each = [_in_stretches(name, record, side.summary, edges) for record in measured(side.records)]
    totals: Floats = np.sum(each, axis=0, initial=0.0)
    return totals / (window.seconds / STRETCHES)


def _amounts(name: str, records: Sequence[RequestRecord], summary: Summary, window: Window) -> Floats:
    edges = np.asarray([window.start, window.end])
    return np.asarray([_in_stretches(name, record, summary, edges)[0] for record in records])


def _in_stretches(name: str, record: RequestRecord, summary: Summary, edges: Floats) -> Floats:
    """The contribution of a request to the rate in each segment; counted as in `metrics`."""
    amounts = np.zeros(len(edges) - 1)
    if record.status != "ok":
        return amounts
    if name == "output_tokens_per_s":
        return np.histogram(record.chunk_at, edges, weights=record.chunk_tokens)[0].astype(np.float64)
    if name == "goodput_per_s" and not (summary.slo and meets(record, summary.slo, summary.mode)):
        return amounts
    of_prompt = name == "input_tokens_per_s"
    if summary.mode == "open":
        moment = record.t_first if of_prompt else record.t_end
        counted = np.histogram([] if moment is None else [moment], edges)[0].astype(np.float64)
    else:
        stretches = [Window(float(low), float(high)) for low, high in pairwise(edges)]
        counted = np.asarray([request_share(record, stretch, "closed") for stretch in stretches])
    return counted * ((record.n_in or 0) if of_prompt else 1)
