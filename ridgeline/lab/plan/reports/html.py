"""A plan as one self-contained page: the answer, the rooflines, latency, memory, cost, decisions.

Written by `result`. Frame and charts come from `lab.page` and `lab.charts`; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.lab.charts import Axis, Line, Point, Points, Rule, chart, grouped, number, roof
from ridgeline.lab.page import Cell, Html, charts, heading, notes, page, paragraph, table, tiles
from ridgeline.lab.perfmodel.roofline import Roofline
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH
from ridgeline.lab.plan.decision_gates import Decision
from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.reports.cold_starts import (
    cold_start_head,
    cold_start_rows,
    starts_of,
    weights_note,
)
from ridgeline.lab.plan.reports.formats import BASIS, HEAD, format_notes, format_rows, formats_of
from ridgeline.lab.plan.reports.text import (
    NAMES,
    cost_rows,
    interval_text,
    memory_rows,
    mtok_range,
    replica_count,
    roofline_rows,
)
from ridgeline.lab.plan.simulated_estimate import verdict

CHART_STEPS = 200
LOOKS = {"yes": "good", "likely": "", "no": "bad"}


def plan_page(
    plan: Plan, decisions: Sequence[Decision], commands: Sequence[tuple[str, str]], made_at: str = ""
) -> str:
    request = plan.request
    subtitle = (
        f"{request.demand.traffic.name}, {number(plan.rate)} arrivals/s; service level {request.slo}; "
        f"{request.chip.title}"
    )
    parts = [
        _tiles(plan),
        notes(plan.caveats),
        *_predicted(plan),
        *_rooflines(plan),
        *_memory(plan),
        *_formats(plan),
        *_cold_starts(plan),
        *_money(plan),
        *_decisions(decisions),
        heading("What to do with it"),
        table(["", ""], [[what, Cell(command, look="words")] for what, command in commands]),
    ]
    return page(f"Plan: {request.shape.name}", parts, subtitle=subtitle, made_at=made_at)


def _tiles(plan: Plan) -> Html:
    found = [
        (
            f"{plan.gpus} × {plan.request.chip.name}",
            replica_count(plan.replicas),
            "GPUs = replicas · tp · pp",
        ),
        (
            plan.engine,
            f"weights in {plan.candidate.precision}, {plan.chosen_format.quality.status}",
            plan.engine_refusal,
        ),
        (
            f"{number(plan.capacity)}/s",
            "arrivals one replica serves",
            "largest rate within the service level",
        ),
    ]
    for key in ("ttft_ms.p90", "tpot_ms.p90"):
        if key in plan.metrics:
            interval = plan.metrics[key]
            words = f"{NAMES[key.partition('.')[0]]}, P90"
            low, mid, high = map(grouped, (interval.low, interval.mid, interval.high))
            found.append((f"{mid} ms", words, f"{low} to {high} ms"))
    if plan.usd_per_hour is not None and plan.usd_per_mtok is not None:
        found.append((f"${plan.usd_per_hour * HOURS_PER_MONTH:,.0f}", "a month", "GPUs · price · 730 hours"))
        each = plan.usd_per_mtok
        found.append((f"${each.mid:.3g}", "per million tokens", mtok_range(plan)))
    return tiles(found)


def _predicted(plan: Plan) -> Iterator[Html]:
    how = "fitted on this machine" if plan.method == "simulated" else "from first principles"
    yield heading(
        "What each replica will measure",
        f"The real scheduler, simulated on this traffic with step times {how}; 80 % intervals.",
    )
    limits = {limit.key: limit for limit in plan.request.slo.limits}
    rows: list[list[str | Cell]] = []
    for name, interval in plan.metrics.items():
        metric, _, percentile = name.partition(".")
        limit = limits.get(name)
        kept = "" if limit is None else verdict(interval, limit)
        rows.append(
            [
                f"{NAMES.get(metric, metric)} {percentile.upper()}".strip(),
                interval_text(interval, metric),
                "" if limit is None else f"{limit.ms:g} ms",
                Cell(kept, look=LOOKS.get(kept, "")),
            ]
        )
    yield table(["", "predicted", "limit", "kept"], rows)


def _rooflines(plan: Plan) -> Iterator[Html]:
    deployment = plan.candidate.deployment
    yield heading(
        "Roofline",
        "Work per byte against what the chip can do: left of the ridge memory binds, right of it arithmetic.",
    )
    flops = deployment.chip.flops_per_s(deployment.kept.linear)
    yield charts([_roof_chart(plan, flops)], wide=True)
    for phase, found in (("Prefill", plan.prefill), ("Decode", plan.decode)):
        yield heading(f"{phase}: {found.bound} binds, at least {grouped(1e3 * found.limit_s)} ms")
        head, *rows = roofline_rows(found)
        yield table(head, rows)
        yield paragraph(
            "What would move it: " + "; ".join(move.text for move in found.what_moves_it), faint=True
        )


def _roof_chart(plan: Plan, flops: float) -> str:
    chip = plan.candidate.deployment.chip
    points = [point for found in (plan.prefill, plan.decode) for point in found.points if point.intensity > 0]
    lowest = min([point.intensity for point in points] + [1.0]) / 2
    highest = max([point.intensity for point in points] + [2 * flops / chip.bytes_per_s]) * 2
    marks: list[Line | Points | Rule] = [
        roof(f"{chip.name} at best", flops, chip.bytes_per_s, lowest, highest),
        Rule("x", flops / chip.bytes_per_s, f"ridge {flops / chip.bytes_per_s:.0f}"),
        _operators("prefill", plan.prefill),
        _operators("decode", plan.decode),
    ]
    return chart(
        "Each operator at its limit",
        Axis("FLOP per byte", log=True),
        Axis("FLOP per second", log=True),
        marks,
        width=980,
        height=380,
    )


def _operators(phase: str, found: Roofline) -> Points:
    """Each operator, and the total."""
    limits = [*((point, point.limit_s) for point in found.points), (found.total, found.limit_s)]
    return Points(
        phase,
        [
            Point(
                point.intensity,
                point.flops / limit_s,
                title=f"{phase} {point.name}: {number(point.flops)}FLOP, {number(point.bytes)}B",
                label=point.name,
            )
            for point, limit_s in limits
            if point.intensity > 0 and limit_s > 0
        ],
    )


def _memory(plan: Plan) -> Iterator[Html]:
    yield heading(f"Memory of each device ({plan.candidate.memory.memory / 1e9:.0f} GB)")
    yield table(["", "", ""], [[row[0], row[1], Cell(row[2], look="words")] for row in memory_rows(plan)])


def _formats(plan: Plan) -> Iterator[Html]:
    yield heading(HEAD, BASIS)
    head, *rows = format_rows(plan)
    shown: list[list[str | Cell]] = []
    for row, figures in zip(rows, formats_of(plan), strict=True):
        look = {"passed": "good", "failed": "bad"}.get(figures.quality.status, "words")
        shown.append([*row[:-1], Cell(row[-1], look=look)])
    yield table(head, shown)
    for note, command in format_notes(plan):
        yield paragraph(f"{note} {command}".strip(), faint=True)


def _cold_starts(plan: Plan) -> Iterator[Html]:
    starts = starts_of(plan)
    if starts:
        head, *rows = cold_start_rows(starts)
        yield heading(cold_start_head(starts), weights_note(starts))
        yield table(["", *head[1:]], rows)


def _money(plan: Plan) -> Iterator[Html]:
    even = plan.even
    if even is None:
        return
    offers = plan.request.offers
    assert offers is not None
    yield heading(
        "Hosted or own, on this traffic", f"{even.profile.note}. Hosted: {even.offer} ({offers.note})."
    )
    head, *rows = cost_rows(plan)
    yield table(head, rows)
    yield charts([_money_chart(plan)], wide=True)


def _money_chart(plan: Plan) -> str:
    """Dollars per day over requests per day, with these busy hours: the API's line, the replicas' steps."""
    even = plan.even
    assert even is not None
    daily = even.requests_per_day
    most = max(2 * daily, 1.2 * (even.even_requests_per_day or 0.0))
    own = [(most * n / CHART_STEPS, even.own_usd_day(most * n / CHART_STEPS)) for n in range(CHART_STEPS + 1)]
    here = Point(daily, even.hosted.usd_month * 24 / HOURS_PER_MONTH, label="this traffic", title="hosted")
    return chart(
        "What a day costs",
        Axis("requests a day"),
        Axis("dollars a day"),
        [
            Line("hosted", [(0.0, 0.0), (most, most * even.hosted.per_request)]),
            Line("own, scaled by the hour", own),
            Points("this traffic", [here]),
        ],
        width=980,
        height=320,
    )


def _reason(decision: Decision) -> Cell:
    return Cell(
        decision.reason, look="words", small=f"ridgeline explain {decision.term}" if decision.term else ""
    )


def _decisions(decisions: Sequence[Decision]) -> Iterator[Html]:
    yield heading("Decisions", "In the order of leverage; each gate with its figures.")
    rows: list[list[str | Cell]] = [
        [one.question, Cell(one.verdict, look="words"), _reason(one)] for one in decisions
    ]
    yield table(["", "", ""], rows)
