"""A sweep for the terminal: one line per load, and the result."""

from __future__ import annotations

from ridgeline.lab.bench.sweeps.sweep import Point, SweepResult

_COLUMNS = (
    ("req/s", "requests_per_s", 1),
    ("tok/s", "output_tokens_per_s", 0),
    ("TTFT p50", "ttft", 0),
    ("p90", "ttft", 0),
    ("TPOT p50", "tpot_ms.p50", 1),
    ("p90", "tpot_ms.p90", 1),
    ("E2E p50", "e2e", 0),
    ("good", "attainment", 2),
)


def head(over: str) -> str:
    return f"{over:>12}" + "".join(f"{title:>10}" for title, _, _ in _COLUMNS) + "  (ms)"


def point_line(point: Point, over: str) -> str:
    """Open loops count from the planned time."""
    spans = {"ttft": "ttft_sched_ms" if over == "rate" else "ttft_ms"}
    spans["e2e"] = "e2e_sched_ms" if over == "rate" else "e2e_ms"
    cells = []
    for title, name, digits in _COLUMNS:
        if name in spans:
            name = f"{spans[name]}.{'p90' if title == 'p90' else 'p50'}"
        value = point.metrics.get(name)
        cells.append(f"{'–' if value is None else f'{value:,.{digits}f}':>10}")
    verdict = point.why_not or ("" if point.valid else "the client could not keep up")
    return f"{point.load:>12g}{''.join(cells)}  {verdict}".rstrip()


def closing_lines(result: SweepResult) -> list[str]:
    limit = f" that keeps {result.slo}" if result.slo else " that the server sustains"
    none = "no load was sustained" if result.points else "no load was measured completely"
    best = none if result.best is None else f"largest {result.over}{limit}: {result.best:g}"
    return [best, f"ended: {result.ended}"]
