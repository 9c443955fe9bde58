"""A plan for the terminal: the answer first, then its basis. Returns lines; `cli` prints them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from ridgeline.lab.charts import grouped, number
from ridgeline.lab.perfmodel.roofline import Roofline
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.decision_gates import Decision, count
from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.reports.cold_starts import (
    cold_start_head,
    cold_start_rows,
    starts_of,
    weights_note,
)
from ridgeline.lab.plan.reports.formats import BASIS, HEAD, format_notes, format_rows
from ridgeline.lab.plan.simulated_estimate import verdict
from ridgeline.lab.plan.verify import Verdict
from ridgeline.lab.prediction import Interval

WIDTH = 100
NAMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "e2e_ms": "whole answer",
    "requests_per_s": "requests per second",
    "output_tokens_per_s": "output tokens per second",
}
MOVES_SHOWN = 3


def plan_lines(plan: Plan, decisions: Sequence[Decision]) -> Iterator[str]:
    yield from _answer(plan)
    yield from _predicted(plan)
    yield from _roofline(plan)
    yield from _memory(plan)
    yield from _formats(plan)
    yield from _cold_starts(plan)
    yield from _costs(plan)
    yield from _decisions(decisions)
    yield from _caveats(plan)


def _answer(plan: Plan) -> Iterator[str]:
    request, demand = plan.request, plan.share
    shape = request.shape
    active = (
        "" if shape.active_parameters == shape.parameters else f", {count(shape.active_parameters)} active"
    )
    yield f"{shape.name}: {count(shape.parameters)} parameters{active}, on {request.chip.title}"
    yield from _wrapped(
        f"traffic: {request.demand.traffic.name}, {number(plan.rate)} arrivals/s, mean "
        f"{demand.mean_input:,.0f} tokens in and {demand.mean_output:,.0f} out; service level: {request.slo}"
    )
    yield ""
    many = replica_count(plan.replicas)
    chips = "this machine" if request.chip.name == "cpu" else f"{plan.gpus} × {request.chip.name}"
    cost = ""
    if plan.usd_per_hour is not None and plan.usd_per_mtok is not None:
        each = plan.usd_per_mtok
        cost = (
            f": ${plan.usd_per_hour * HOURS_PER_MONTH:,.0f} a month, ${each.mid:.3g} per million tokens "
            f"({mtok_range(plan)}; {_few(demand.mean_input / demand.mean_output)} of them input for each "
            "output)"
        )
    yield from _wrapped(
        f"ANSWER  {chips} as {many}, {plan.engine}, weights in {plan.candidate.precision} "
        f"({plan.chosen_format.quality.status}){cost}"
    )
    yield from _wrapped(
        f"One replica serves up to {number(plan.capacity)} arrivals/s within the service level; here it gets "
        f"{number(demand.rate or 0)}, {_few(plan.estimate.concurrency)} requests at once, a step under way "
        f"{plan.estimate.busy_share:.0%} of the time."
    )


def _predicted(plan: Plan) -> Iterator[str]:
    how = (
        "simulated with step times fitted on this machine"
        if plan.method == "simulated"
        else "simulated with step times from first principles"
    )
    yield from _headed(f"What each replica will measure ({how}; 80 % intervals)")
    limits = {limit.key: limit for limit in plan.request.slo.limits}
    rows = [["", "", "predicted", "interval", "limit", "kept"]]
    for name, interval in plan.metrics.items():
        metric, _, percentile = name.partition(".")
        limit = limits.get(name)
        rows.append(
            [
                NAMES.get(metric, metric),
                percentile.upper(),
                _value(interval.mid, metric),
                f"{_value(interval.low, metric)} to {_value(interval.high, metric)}",
                "" if limit is None else f"{limit.ms:g} ms",
                "" if limit is None else verdict(interval, limit),
            ]
        )
    yield from columns(rows, left=(0, 1))
    for limit in plan.request.slo.limits:
        if limit.key not in plan.metrics:
            yield from _wrapped(f"{limit}: {verdict(None, limit)}; --requests 1200 makes more", "  ")
    if plan.corrected:
        most = max(correction.runs for correction in plan.corrected.values())
        changes = [f"{name} {correction.factor - 1:+.0%}" for name, correction in plan.corrected.items()]
        runs = f"{most} verified run{'s' * (most > 1)}"
        yield from _wrapped(
            f"corrected by the errors of earlier plans, from {runs}: {', '.join(changes)}", "  "
        )


def _roofline(plan: Plan) -> Iterator[str]:
    for phase, found in (("prefill", plan.prefill), ("decode", plan.decode)):
        chunk = min(plan.settings.limits.prefill_chunk, round(plan.share.mean_input))
        at = (
            f"{chunk} prompt tokens"
            if phase == "prefill"
            else f"batch {max(1, round(plan.estimate.concurrency))}"
        )
        yield from _headed(
            f"Roofline of {phase} ({at}): {found.bound} binds, at least {grouped(1e3 * found.limit_s)} ms; "
            f"{number(found.total.intensity)} FLOP/byte, the chip's ridge is {number(found.total.ridge)}"
        )
        yield from columns(roofline_rows(found), left=(0, 5))
        for move in found.what_moves_it[:MOVES_SHOWN]:
            yield from _wrapped(f"what would move it: {move.text}", "  ")


def roofline_rows(found: Roofline) -> list[list[str]]:
    head = ["operator", "FLOP", "bytes", "FLOP/byte", "at least", "bound by"]
    rows = [(point, point.limit_s, point.bound) for point in found.points]
    # Operators run in sequence: the pass takes the sum of their times.
    rows.append((found.total, found.limit_s, found.bound))
    return [head] + [
        [
            point.name,
            number(point.flops),
            number(point.bytes),
            number(point.intensity),
            f"{grouped(1e3 * limit_s)} ms",
            bound,
        ]
        for point, limit_s, bound in rows
    ]


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.candidate.memory
    where = "this machine (free now)" if plan.request.chip.name == "cpu" else "each GPU"
    yield from _headed(f"Memory of {where}: {memory.memory / 1e9:.0f} GB")
    yield from columns(memory_rows(plan), left=(0,))


def _formats(plan: Plan) -> Iterator[str]:
    yield from _headed(HEAD)
    yield from columns(format_rows(plan), left=(0, 1, 4))
    yield from _wrapped(BASIS, "  ")
    for note, command in format_notes(plan):
        yield from _wrapped(note, "  ")
        if command:
            yield f"    {command}"  # in one line, to be copied


def _cold_starts(plan: Plan) -> Iterator[str]:
    starts = starts_of(plan)
    if starts:
        yield from _headed(cold_start_head(starts))
        yield from columns(cold_start_rows(starts), left=(0,))
        yield from _wrapped(weights_note(starts), "  ")


def mtok_range(plan: Plan) -> str:
    """The price range of a million tokens: replicas are whole, so it moves in steps."""
    each = plan.usd_per_mtok
    assert each is not None
    if each.low == each.high:
        return f"{replica_count(plan.replicas)} at either end of the interval"
    if math.isinf(each.high):
        return f"from ${each.low:.3g}; with the slowest steps, no number of replicas keeps the limits"
    return f"${each.low:.3g} to ${each.high:.3g}"


def memory_rows(plan: Plan) -> list[list[str]]:
    memory = plan.candidate.memory
    return [
        [
            "weights",
            _gb(memory.weights),
            f"{plan.candidate.precision}, at least {memory.gpus_needed} to hold the model",
        ],
        ["activations", _gb(memory.activations), ""],
        ["reserve", _gb(memory.reserve), "for driver, graphs, fragments; other programs"],
        [
            "KV cache",
            _gb(max(0, memory.kv_room)),
            f"{number(memory.kv_per_token)}B a token, {number(memory.kv_per_request)}B a request: "
            f"{memory.requests_that_fit:,} requests fit at once",
        ],
    ]


def _costs(plan: Plan) -> Iterator[str]:
    even, request = plan.even, plan.request
    if even is None:
        return
    offers = request.offers
    assert offers is not None
    yield from _headed("Hosted or own, on this traffic")
    yield from columns(cost_rows(plan), left=(0,))
    yield from _wrapped(f"hosted: {even.offer} ({offers.note})", "  ")
    if offers.count > 1:
        yield from _wrapped(f"cheapest of them: {offers.cheapest}", "  ")
    is_listed = request.usd_per_gpu_hour == request.chip.usd_per_hour
    source = request.chip.sources.get("usd_per_hour", "") if is_listed else "as given"
    yield from _wrapped(f"own: ${request.usd_per_gpu_hour:g} an hour and GPU ({source})", "  ")
    yield from _wrapped(
        f"{even.profile.note}; {even.idle_share:.0%} of the GPU hours would be idle around the clock, "
        f"{even.idle_share_scaled:.0%} scaled by the hour",
        "  ",
    )
    if even.even_requests_per_day is not None and even.even_share is not None:
        yield from _wrapped(
            f"break-even: {even.even_requests_per_day:,.0f} requests a day at such hours, scaled by the "
            f"hour; GPU hours pay where they are {even.even_share:.0%} busy",
            "  ",
        )
    else:
        yield from _wrapped("break-even: never; even a fully used replica costs more than the API", "  ")


def cost_rows(plan: Plan) -> list[list[str]]:
    even, users = plan.even, plan.request.users
    assert even is not None
    candidates = [
        ("hosted", even.hosted),
        ("hosted, without its cache discount", even.hosted_no_cache),
        ("hosted, all as batches", even.hosted_batch),
        (f"own, {replica_count(even.replicas_busiest)} around the clock", even.own_always),
        ("own, scaled by the hour", even.own_scaled),
    ]
    rows = [["", "a month", "a request", "per Mtok", *(["a user and month"] if users else [])]]
    for name, costs in candidates:
        if costs is None or (costs is even.hosted_no_cache and costs == even.hosted):
            continue
        row = [name, f"${costs.usd_month:,.0f}", f"${costs.per_request:.3g}", f"${costs.per_mtok:.3g}"]
        rows.append([*row, *([f"${costs.per_user(users):.3g}"] if users else [])])
    return rows


def _decisions(decisions: Sequence[Decision]) -> Iterator[str]:
    yield from _headed("Decisions (`ridgeline explain TERM` explains the terms in brackets)")
    for place, decision in enumerate(decisions, start=1):
        more = f" [{decision.term}]" if decision.term else ""
        yield from _wrapped(
            f"{place}. {decision.question} {decision.verdict.upper()}: {decision.reason}{more}",
            "   ",
            first="",
        )


def _caveats(plan: Plan) -> Iterator[str]:
    caveats = plan.caveats
    if caveats:
        yield from _headed("Before you rely on it")
        for caveat in caveats:
            yield from _wrapped(f"- {caveat}", "  ", first="")


def verdict_lines(found: Verdict) -> Iterator[str]:
    """A scored prediction, for the terminal."""
    yield f"{found.run.name}"
    rows = [["metric", "predicted", "interval", "measured", "error", "inside"]]
    for score in found.scores:
        metric = score.metric.partition(".")[0]
        rows.append(
            [
                score.metric,
                _value(score.predicted.mid, metric),
                f"{_value(score.predicted.low, metric)} to {_value(score.predicted.high, metric)}",
                _value(score.measured, metric),
                f"{score.error:+.1%}",
                "yes" if score.is_inside else "no",
            ]
        )
    yield from columns(rows, left=(0,))
    coverage = found.scores[0].predicted.coverage
    yield (
        f"median error {found.median_error:.1%}; {found.inside} of {len(found.scores)} inside intervals that "
        f"claim {coverage:.0%}"
    )
    if found.missing:
        yield f"not measured by the run: {', '.join(found.missing)}"
    for caveat in found.caveats:
        yield f"caveat: {caveat}"


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (), indent: str = "  ") -> Iterator[str]:
    """Right-aligned, except the named columns and the last, which contain text."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if place in left or place == len(row) - 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (indent + "  ".join(cells)).rstrip()


def interval_text(interval: Interval, metric: str) -> str:
    return (
        f"{_value(interval.mid, metric)} ({_value(interval.low, metric)} to {_value(interval.high, metric)})"
    )


def _value(value: float, metric: str) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} ms" if metric.endswith("_ms") else text


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def replica_count(many: int) -> str:
    return f"{many} replica{'s' * (many > 1)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _headed(title: str) -> Iterator[str]:
    yield ""
    yield from _wrapped(title)


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent if first is not None else indent + ("  " if indent else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
