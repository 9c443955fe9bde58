"""The tables of `ridgeline simulate fleet`: figures with intervals, ratios, decisions, notes."""

from __future__ import annotations

from ridgeline.lab.simulate.fleet.compare import Compared, Mean
from ridgeline.lab.simulate.fleet.setup import EXACT_REPLICAS, FleetSetup
from ridgeline.lab.slo import Slo

BASE = "round-robin"
COLUMNS = (
    ("SLO kept", "slo", "{:.1%}"),
    ("TTFT p50 ms", "ttft_ms.p50", "{:,.0f}"),
    ("TTFT p90 ms", "ttft_ms.p90", "{:,.0f}"),
    ("TTFT p99 ms", "ttft_ms.p99", "{:,.0f}"),
    ("output tok/s", "output_tokens_per_s", "{:,.0f}"),
    ("cache hit", "cache_hit", "{:.1%}"),
    ("failed", "failed", "{:,.0f}"),
    ("cost", "cost", "{:,.2f}"),
)
RATIOS = (("TTFT p90", "ttft_ms.p90"), ("output tok/s", "output_tokens_per_s"))


def report(compared: Compared, setup: FleetSetup, slo: Slo) -> list[str]:
    policies = list(compared.figures)
    seeds = len(compared.figures[policies[0]]["slo"])
    run = compared.runs[policies[0]]
    lines = [
        f"{run.replicas} replicas, {setup.routers} routers, SLO {slo}; "
        + ("1 seed: no intervals" if seeds == 1 else f"mean of {seeds} seeds ± half of the 95 % interval")
    ]
    rows = [["policy", *(title for title, _, _ in COLUMNS)]]
    for policy in policies:
        cells = [_cell(compared.mean(policy, key), shape) for _, key, shape in COLUMNS]
        rows.append([policy, *cells])
    lines += ["", *_aligned(rows)]
    if BASE in policies and len(policies) > 1:
        rows = [[f"ratio to {BASE}", *(title for title, _ in RATIOS)]]
        for policy in policies:
            if policy != BASE:
                ratios = [_cell(compared.ratio(policy, BASE, key), "{:.3f}") for _, key in RATIOS]
                rows.append([policy, *ratios])
        lines += ["", *_aligned(rows)]
    for policy in policies:
        lines += _decisions(compared, policy)
    return [*lines, *_caveats(compared, setup)]


def _decisions(compared: Compared, policy: str) -> list[str]:
    run = compared.runs[policy]
    lines = [f"  {at:8.1f} s  {decision.explain.sentence}" for at, decision in run.decisions[:12]]
    if len(run.decisions) > 12:
        lines.append(f"  and {len(run.decisions) - 12} more")
    if run.rollout:
        lines.append(f"  rollout: {run.rollout}")
    return ["", f"{policy}, first seed:", *lines] if lines else []


def _caveats(compared: Compared, setup: FleetSetup) -> list[str]:
    notes = []
    run = next(iter(compared.runs.values()))
    if run.is_projection:
        notes.append(
            f"PROJECTION: {EXACT_REPLICAS} replicas were simulated with their part of the traffic; "
            f"throughput and cost are multiplied by {run.scale:g}"
        )
    if setup.times.source != "fitted":
        notes.append(f"step times are {setup.times.source}: no step of this hardware was measured")
    return ["", *(f"note: {note}" for note in notes)] if notes else []


def _cell(mean: Mean, shape: str) -> str:
    if mean.half is None or mean.half == 0:
        return shape.format(mean.mid)
    return f"{shape.format(mean.mid)} ± {shape.format(mean.half)}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
