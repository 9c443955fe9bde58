"""Fits StepTimes to step records: non-negative least squares of relative errors, robust to disturbed steps.

Other work on the machine makes some steps slow and none fast, so outliers lose their weight; the result is
scaled so that all ordinary steps together take the measured time. Whole traces are held out: each is
predicted by a fit on the others. Called by `simulate.measure` and `analytic_times`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.errors import LabError
from ridgeline.lab.perfmodel.step_times import QUANTILES, HostTimes, StepTimes, Terms, TraceError
from ridgeline.telemetry.stats import StepRecord

Array = NDArray[np.float64]

KNOTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEWEST = 20  # minimum records of a kind of step, or of a piece between two knots
ROUNDS = 12
CUT = 4.685  # in median deviations: steps beyond have no weight (Tukey's biweight)
ORDINARY = 2.5  # a step slower than this many times its prediction was disturbed
STRETCH_S, FEWEST_STRETCHES = 1.0, 5  # segment of a trace for measuring the machine's speed
GAIN = 0.98  # pieces must lower the error to this share of a single line's


def fit_step_times(
    traces: Mapping[str, Sequence[StepRecord]],
    *,
    lookahead: int = 0,
    batches: Sequence[int] = (),
    about: Mapping[str, str] | None = None,
    is_noisy: bool = True,
    load: float | None = None,
) -> StepTimes:
    """traces: step records by the name of the run they come from, each in the order of its steps
    lookahead: how many steps are launched before the oldest is read
    batches: sizes that decode steps are padded to (graph buckets)
    is_noisy: treat outliers as disturbed; False: every step counts fully
    load: runnable tasks per core before the traffic began

    Raises LabError if there are too few records.
    """
    rounds = ROUNDS if is_noisy else 1
    times = _fit([record for trace in traces.values() for record in trace], batches, rounds)
    errors = []
    if len(traces) > 1:
        for name, held_out in traces.items():
            others = [record for other, trace in traces.items() if other != name for record in trace]
            if _enough(others) and held_out:
                errors.append(error_on(_fit(others, batches, rounds), name, held_out))
    return msgspec.structs.replace(
        times,
        host=_fit_host(list(traces.values()), lookahead),
        fitted_on=tuple(traces),
        errors=tuple(errors),
        about=dict(about or {}),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        speeds=_speeds(times, traces.values()),
        load_before=load,
    )


def error_on(times: StepTimes, name: str, records: Sequence[StepRecord]) -> TraceError:
    """How well `times` predicts records that it was not fitted on."""
    predicted = np.array([times.seconds(work_of(record)) for record in records])
    measured = np.array([record.busy_s for record in records])
    errors = np.abs(predicted / measured - 1)
    return TraceError(
        trace=name,
        records=len(records),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        total=float(predicted.sum() / measured.sum() - 1),
    )


def work_of(record: StepRecord) -> StepWork:
    return StepWork(
        record.prefill_tokens,
        record.prefill_rows,
        record.prefill_context_product,
        record.decode_batch,
        record.decode_context,
    )


def _speeds(times: StepTimes, traces: Iterable[Sequence[StepRecord]]) -> tuple[float, float]:
    """P10 and P90 of measured / predicted seconds over segments of one second.

    One slow step is noise, which the fit ignores. A slow second is a machine that something else used, and a
    later run may spend all its time in such seconds.
    """
    ratios = []
    for trace in traces:
        stretches: dict[int, tuple[float, float]] = {}
        for record in trace:
            place = int((record.start - trace[0].start) / STRETCH_S)
            measured, predicted = stretches.get(place, (0.0, 0.0))
            stretches[place] = (measured + record.busy_s, predicted + times.seconds(work_of(record)))
        ratios += [measured / predicted for measured, predicted in stretches.values() if predicted > 0]
    if len(ratios) < FEWEST_STRETCHES:
        return 1.0, 1.0
    low, high = np.quantile(ratios, [0.1, 0.9])
    return float(low), float(high)


# ── the terms ────────────────────────────────────────────────────────────────────────────────────────────


def _enough(records: Sequence[StepRecord]) -> bool:
    return len(records) >= 2 * FEWEST


def _fit(records: Sequence[StepRecord], batches: Sequence[int], rounds: int) -> StepTimes:
    records = [record for record in records if record.busy_s > 0]
    if not _enough(records):
        raise LabError(
            f"{len(records)} step records are too few to fit step times on; run more traffic "
            f"(at least {2 * FEWEST} steps, better thousands)"
        )
    padded = StepTimes(Terms(0.0, (), ()), Terms(0.0, (), ()), batches=tuple(sorted(batches)))
    decode = [record for record in records if not record.prefill_tokens]
    mixed = [record for record in records if record.prefill_tokens]
    # A rare kind of step has no separate coefficients.
    terms = {
        name: _fit_terms(own if len(own) >= FEWEST else records, padded, rounds)
        for name, own in (("decode", decode), ("mixed", mixed))
    }
    return msgspec.structs.replace(padded, **terms)


def _fit_terms(records: Sequence[StepRecord], padded: StepTimes, rounds: int) -> Terms:
    """Piecewise if that predicts held-out records better, otherwise in one piece."""
    work = [work_of(record) for record in records]
    seconds = np.array([record.busy_s for record in records])
    tokens = np.array([w.prefill_tokens + padded.padded(w.decode_batch) for w in work], float)
    rest = np.array(
        [
            (w.decode_batch, w.decode_context, w.prefill_context_product, w.prefill_rows)
            if w.prefill_tokens
            else (0, w.decode_context, 0, 0)  # a decode-only step has only token terms
            for w in work
        ],
        float,
    )
    knots: tuple[float, ...] = (0.0,)
    pieces = _knots(tokens)
    if len(pieces) > 1:
        straight, bent = (_cross_error(tokens, rest, seconds, k, rounds) for k in (knots, pieces))
        knots = pieces if bent < GAIN * straight else knots
    coefficients = _solve(_columns(tokens, rest, knots), seconds, rounds)
    predicted = _columns(tokens, rest, knots) @ coefficients
    ratios = seconds / predicted
    ordinary = (ratios < ORDINARY) & (ratios > 1 / ORDINARY)
    if ordinary.any():
        scale = seconds[ordinary].sum() / predicted[ordinary].sum()
        coefficients, ratios = coefficients * scale, ratios / scale
    fixed, slopes, others = coefficients[0], coefficients[1 : 1 + len(knots)], coefficients[1 + len(knots) :]
    batch_s, context_s, product_s, row_s = (float(value) for value in others)
    shares = np.clip(np.linspace(0, 1, QUANTILES), 0.0025, 0.9975)
    return Terms(
        fixed_s=float(fixed),
        knots=knots,
        token_s=tuple(float(slope) for slope in slopes),
        batch_s=batch_s,
        context_s=context_s,
        context_product_s=product_s,
        row_s=row_s,
        ratios=tuple(float(value) for value in np.quantile(ratios, shares)),
        ranges=_ranges(tokens, work),
        records=len(records),
    )


def _knots(tokens: Array) -> tuple[float, ...]:
    """The knots with enough records between each and the next."""
    chosen = [0.0]
    for knot in KNOTS:
        if np.sum((tokens > chosen[-1]) & (tokens <= knot)) >= FEWEST and np.sum(tokens > knot) >= FEWEST:
            chosen.append(float(knot))
    return tuple(chosen)


def _columns(tokens: Array, rest: Array, knots: tuple[float, ...]) -> Array:
    pieces = [
        np.clip(tokens - knot, 0, (knots[place + 1] if place + 1 < len(knots) else np.inf) - knot)
        for place, knot in enumerate(knots)
    ]
    return np.column_stack([np.ones_like(tokens), *pieces, rest])


def _cross_error(tokens: Array, rest: Array, seconds: Array, knots: tuple[float, ...], rounds: int) -> float:
    """The median relative error on each third of the records, in time, by a fit on the other two."""
    errors: list[Array] = []
    for part in np.array_split(np.arange(len(seconds)), 3):
        others = np.setdiff1d(np.arange(len(seconds)), part)
        solution = _solve(_columns(tokens[others], rest[others], knots), seconds[others], rounds)
        predicted = _columns(tokens[part], rest[part], knots) @ solution
        errors.append(np.abs(predicted / seconds[part] - 1))
    return float(np.median(np.concatenate(errors)))


def _solve(columns: Array, seconds: Array, rounds: int = ROUNDS) -> Array:
    """Coefficients ≥ 0 with the least squares of relative errors, with outliers down-weighted."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    relative = columns / scale / seconds[:, None]
    weights = np.ones_like(seconds)
    solution: Any = None
    for _ in range(rounds):
        solution, _ = nnls(relative * weights[:, None], weights)
        off = np.log(np.maximum(relative @ solution, 1e-9))
        spread = max(1.4826 * float(np.median(np.abs(off - np.median(off)))), 1e-4)
        weights = np.clip(1 - (off / (CUT * spread)) ** 2, 0, None)
        if not weights.any():  # a bad start: everything is an outlier
            weights = np.ones_like(seconds)
    return np.asarray(solution / scale, float)


def _ranges(tokens: Array, work: list[StepWork]) -> dict[str, tuple[float, float]]:
    columns = {
        "tokens": tokens,
        "decode_batch": np.array([w.decode_batch for w in work], float),
        "decode_context": np.array([w.decode_context for w in work], float),
        "prefill_context_product": np.array([w.prefill_context_product for w in work], float),
    }
    return {name: (float(values.min()), float(values.max())) for name, values in columns.items()}


# ── the host ─────────────────────────────────────────────────────────────────────────────────────────────


def _fit_host(traces: list[Sequence[StepRecord]], lookahead: int) -> HostTimes:
    """From the times between steps. If no sequence decodes in a step, the engine may have idled before it."""
    records = [record for trace in traces for record in trace]
    rows = np.array([record.decode_batch + record.prefill_rows for record in records], float)
    schedule = _line(rows, np.array([record.schedule_s for record in records]))
    gap_rows, gaps = [], []
    for trace in traces:
        for before, after in zip(trace, trace[1 + lookahead :], strict=False):
            ended = before.start + before.schedule_s + before.wall_s
            if after.step_id == before.step_id + 1 + lookahead and after.decode_batch and after.start > ended:
                gap_rows.append(before.decode_batch + before.prefill_rows)
                gaps.append(after.start - ended)
    turn = _line(np.array(gap_rows, float), np.array(gaps)) if len(gaps) >= FEWEST else (0.0, 0.0)
    return HostTimes(*schedule, *turn)


def _line(rows: Array, seconds: Array) -> tuple[float, float]:
    fixed, per_row = _solve(np.column_stack([np.ones_like(rows), rows]), np.maximum(seconds, 1e-9))
    predicted = fixed + per_row * rows
    ordinary = seconds < 10 * predicted  # the mean, not the median: short waits for a busy CPU count
    scale = seconds[ordinary].sum() / predicted[ordinary].sum() if ordinary.any() else 1.0
    return float(fixed * scale), float(per_row * scale)
