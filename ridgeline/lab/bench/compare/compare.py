"""Compares two runs: per metric the difference and the ratio with 95 % intervals, or "no difference".

If both ran the same traffic, each request is compared with itself (pairs), which shows smaller effects. The
intervals cover the spread within the runs, not between runs: compare a run with its own repetition first.
Called by `ridgeline bench compare` and tune; `comparison` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.lab.bench.compare.compare_rates import rate_rows
from ridgeline.lab.bench.compare.difference import Difference, Side, Spread, drawn_row, measured
from ridgeline.lab.bench.figures.bootstrap import Column, block_weights
from ridgeline.lab.bench.figures.metrics import FORMULAS, Summary, tpot_s
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.statistics import FEWEST, QUANTILES, wilson

RESAMPLES, FEWEST_RESAMPLES = 1000, 300
ENOUGH_DRAWN = 4_000_000  # requests drawn in all resamples; large runs get fewer resamples
SAME_MOMENT_S = 1e-3
PAIRED_SHARE = 0.9  # of the requests must be in both runs
# Settings that identify a run or its time and do not affect its result.
NAMES_ONLY = (
    *("name", "started_at", "ended_at", "made_at", "out", "salt", "version"),
    *("load_average", "usd_per_hour"),
)


@dataclass(frozen=True)
class Comparison:
    a: str
    b: str
    mode: str  # of A: open loops count from the planned time, closed ones from sending
    rows: tuple[Difference, ...]
    pairs: int  # requests compared with themselves; 0: the runs are compared as wholes
    unpaired_because: str
    invalid: tuple[str, ...]
    changed: tuple[tuple[str, str, str], ...]  # setting, in A, in B
    notes: tuple[str, ...]

    @property
    def headline(self) -> tuple[Difference, ...]:
        """Important rows first: latencies as the mode counts them, without means; rates and shares."""
        other = ("ttft_ms.", "e2e_ms.") if self.mode == "open" else ("ttft_sched_ms.", "e2e_sched_ms.")
        return tuple(row for row in self.rows if not row.name.startswith(other) and "mean" not in row.name)


def compare(a: Side, b: Side, *, seed: int = 0, resamples: int | None = None) -> Comparison:
    """B against A. Metrics that either run lacks are omitted."""
    left, right = measured(a.records), measured(b.records)
    if resamples is None:
        affordable = ENOUGH_DRAWN // max(len(left), len(right), 1)
        resamples = max(FEWEST_RESAMPLES, min(RESAMPLES, affordable))
    pairs, because = _pairs(left, right, a.summary.mode, b.summary.mode)
    both = [(x, y) for x, y in pairs if x.status == y.status == "ok"]
    dropped = len(pairs) - len(both)
    answered_a = [x for x, _ in both] if pairs else [x for x in left if x.status == "ok"]
    answered_b = [y for _, y in both] if pairs else [y for y in right if y.status == "ok"]
    rows = [
        *_latencies(answered_a, answered_b, bool(pairs), seed, resamples),
        *rate_rows(a, b, pairs, seed, resamples),
        *_shares(a.summary, b.summary),
        *_cache_hit(answered_a, answered_b, bool(pairs), seed, resamples),
    ]
    return Comparison(
        a.name,
        b.name,
        a.summary.mode,
        tuple(rows),
        len(both),
        because,
        tuple(f"{side.name}: {reason}" for side in (a, b) for reason in side.invalid),
        tuple(changed_settings(a.settings, b.settings)),
        tuple(_notes(a, b, rows, dropped, because)),
    )


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    left, right = dict(_leaves(a)), dict(_leaves(b))
    names = [*left, *(name for name in right if name not in left)]
    return [
        (name, left.get(name, "–"), right.get(name, "–"))
        for name in names
        if name.rpartition(".")[2] not in NAMES_ONLY and left.get(name) != right.get(name)
    ]


# ── which requests are the same ──────────────────────────────────────────────────────────────────────────


def _pairs(
    a: Sequence[RequestRecord], b: Sequence[RequestRecord], mode_a: str, mode_b: str
) -> tuple[list[tuple[RequestRecord, RequestRecord]], str]:
    """Requests that both runs sent; or none, and why."""
    if mode_a != mode_b:
        return [], f"one loop is {mode_a}, the other {mode_b}"
    others = {record.index: record for record in b}
    found = [(record, others[record.index]) for record in a if record.index in others]
    if len(found) < PAIRED_SHARE * max(len(a), len(b), 1):
        return [], f"only {len(found)} requests of {len(a)} and {len(b)} are in both runs"
    if any(_asked(x) != _asked(y) for x, y in found):
        return [], "the requests differ in their lengths"
    late = [abs(x.t_sched - y.t_sched) for x, y in found]
    if mode_a == "open" and max(late, default=0.0) > SAME_MOMENT_S:
        return [], "the requests were due at different times"
    return found, ""


def _asked(record: RequestRecord) -> tuple[int, int, int | None, int]:
    return record.planned_in, record.planned_out, record.conversation, record.turn


# ── latencies ────────────────────────────────────────────────────────────────────────────────────────────


def _since(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


_SECONDS: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda r: _since(r.t_first, r.t_send),
    "ttft_sched_ms": lambda r: _since(r.t_first, r.t_sched),
    "tpot_ms": tpot_s,
    "e2e_ms": lambda r: _since(r.t_last, r.t_send),
    "e2e_sched_ms": lambda r: _since(r.t_last, r.t_sched),
}


def _columns(records: Sequence[RequestRecord]) -> dict[str, Column]:
    columns = {}
    for name, seconds in _SECONDS.items():
        found = [
            (took * 1000, i) for i, record in enumerate(records) if (took := seconds(record)) is not None
        ]
        columns[name] = Column([value for value, _ in found], [owner for _, owner in found])
    gaps = [np.diff(record.chunk_at) * 1000 for record in records]
    shares = [np.maximum(np.asarray(record.chunk_tokens[1:], dtype=np.int64), 1) for record in records]
    spread = [np.repeat(gap / share, share) for gap, share in zip(gaps, shares, strict=True)]
    owners = np.repeat(np.arange(len(records)), [len(own) for own in spread])
    columns["itl_ms"] = Column(np.concatenate(spread) if spread else [], owners)
    return columns


def _latencies(
    a: Sequence[RequestRecord], b: Sequence[RequestRecord], paired: bool, seed: int, resamples: int
) -> list[Difference]:
    if not a or not b:
        return []
    left, right = _columns(a), _columns(b)
    names = [name for name in left if len(left[name]) and len(right[name])]
    quantiles = tuple(QUANTILES.values())

    def figures(columns: dict[str, Column], weights: Any) -> list[float]:
        found: list[float] = []
        for name in names:
            found += [*columns[name].quantiles(weights, quantiles), columns[name].mean(weights)]
        return found

    values_a = figures(left, np.ones(len(a), dtype=np.int64))
    values_b = figures(right, np.ones(len(b), dtype=np.int64))
    drawn_a = np.asarray([figures(left, weights) for weights in block_weights(len(a), resamples, seed)])
    other = seed if paired else seed + 1  # the same requests on both sides if paired
    drawn_b = np.asarray([figures(right, weights) for weights in block_weights(len(b), resamples, other)])
    rows, place = [], 0
    for name in names:
        samples = (len(left[name]), len(right[name]))
        for key in (*QUANTILES, "mean"):
            enough = min(len(a), len(b)) >= FEWEST.get(key, 1)
            if enough:
                given = (values_a[place], values_b[place], drawn_a[:, place], drawn_b[:, place])
                rows.append(drawn_row(f"{name}.{key}", "ms", FORMULAS[name], *given, samples, True))
            place += 1
    return rows


# ── shares ─────────────────────────────────────────────────────────────────────────────────────


def _shares(a: Summary, b: Summary) -> list[Difference]:
    """Proportions of requests, by Newcombe's interval, which is also valid at 0 and 1."""
    rows = []
    counts = {
        "attainment": ((a.good, a.offered), (b.good, b.offered)),
        "failures": ((a.failed, a.offered), (b.failed, b.offered)),
    }
    for name, ((good_a, of_a), (good_b, of_b)) in counts.items():
        if not (of_a and of_b) or (name == "attainment" and (a.slo is None or b.slo is None)):
            continue
        share_a, share_b = good_a / of_a, good_b / of_b
        (low_a, high_a), (low_b, high_b) = wilson(good_a, of_a), wilson(good_b, of_b)
        change = share_b - share_a
        low = change - math.hypot(share_b - low_b, high_a - share_a)
        high = change + math.hypot(high_b - share_b, share_a - low_a)
        spread = Spread(change, low, high)
        better_low = name == "failures"
        formula = FORMULAS[name]
        rows.append(Difference(name, "", formula, share_a, share_b, spread, None, better_low, (of_a, of_b)))
    return rows


def _cache_hit(
    a: Sequence[RequestRecord], b: Sequence[RequestRecord], paired: bool, seed: int, resamples: int
) -> list[Difference]:
    if not a or not b or any(record.n_cached is None or not record.n_in for record in (*a, *b)):
        return []
    draws = []
    for records, start in ((a, seed), (b, seed if paired else seed + 1)):
        table = np.asarray([(record.n_cached or 0, record.n_in or 0) for record in records], dtype=np.float64)
        sums = np.asarray([weights @ table for weights in block_weights(len(records), resamples, start)])
        draws.append((float(table[:, 0].sum() / table[:, 1].sum()), sums[:, 0] / sums[:, 1]))
    (hit_a, drawn_a), (hit_b, drawn_b) = draws
    formula = FORMULAS["cache_hit"]
    return [drawn_row("cache_hit", "", formula, hit_a, hit_b, drawn_a, drawn_b, (len(a), len(b)), False)]


# ── what to mind ─────────────────────────────────────────────────────────────────────────────────────────


def _notes(a: Side, b: Side, rows: Sequence[Difference], dropped: int, because: str) -> list[str]:
    found = []
    if because:
        found.append("the runs did not send the same traffic: differences may come from the traffic")
    if dropped:
        found.append(
            f"{dropped} requests failed in one run or in both: latencies compare those that both answered, "
            "which favours the run that failed more"
        )
    if a.summary.window.note or b.summary.window.note:
        found.append("a run was too short for a steady window: its rates include filling and emptying")
    seen = sum(row.seen for row in rows)
    if seen:
        chance = max(1, round(len(rows) / 20))
        found.append(
            f"{seen} of {len(rows)} rows differ at 95 %; about {chance} would by chance between equal runs"
        )
    found.append(
        "intervals cover the spread within these runs, not between runs: compare a run with its own "
        "repetition (A/A) first, and believe differences larger than those"
    )
    return found


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        found += (
            _leaves(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else [(prefix + name, str(value))]
        )
    return found
