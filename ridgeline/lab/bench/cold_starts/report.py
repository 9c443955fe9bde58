"""Reports cold starts: segments with their spread, as a terminal table and as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ridgeline.lab.bench.cold_starts.cold_start import SEGMENTS, ColdStarts, Start
from ridgeline.lab.charts import Row, Span, timeline
from ridgeline.lab.page import Cell, banner, charts, facts, heading, page, paragraph, table

STAGES = ("to the open port", "to ready", "to the first token", "to the second token")


def cold_start_text(found: ColdStarts) -> str:
    lines = [f"{found.command}", _about(found), ""]
    rows = [["segment", "median", "least", "most", "starts"], *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    lines += [f"start {number}: FAILED: {failure}" for number, failure in _failures(found)]
    return "\n".join(lines)


def cold_start_page(found: ColdStarts) -> str:
    failures = _failures(found)
    parts = []
    if failures:
        reasons = [f"start {number}: {failure}" for number, failure in failures]
        parts.append(banner(f"{len(failures)} of {len(found.starts)} starts failed", reasons))
    parts += [paragraph(_about(found)), heading("Segments")]
    parts.append(table(["", "median", "least", "most", "starts"], _rows(found)))
    rows_drawn = [_row(number, start) for number, start in enumerate(found.starts, 1)]
    drawn = timeline(
        "Every start", rows_drawn, STAGES, x_label="seconds from the spawn", y_label="starts", width=1040
    )
    parts.append(charts([drawn], wide=True))
    head = ["start", *SEGMENTS]
    rows: list[list[str | Cell]] = [
        [str(number), *(_written(segment(start)) for segment in SEGMENTS.values())]
        for number, start in enumerate(found.starts, 1)
    ]
    parts += [heading("Every start"), table(head, rows), heading("Settings")]
    parts.append(facts({"command": found.command, "page cache": found.page_cache, "machine": found.machine}))
    return page("Cold start", parts, subtitle=found.command, made_at=found.started_at)


def _about(found: ColdStarts) -> str:
    stopped = "" if len(found.starts) == found.wanted else f" of {found.wanted} (stopped early)"
    return (
        f"{len(found.starts)} starts{stopped}; page cache {found.page_cache}; "
        f"port and readiness were polled every {found.resolution_s * 1000:g} ms"
    )


def _rows(found: ColdStarts) -> list[list[str]]:
    rows = []
    for name, segment in SEGMENTS.items():
        took = [value for start in found.starts if (value := segment(start)) is not None]
        spread = [statistics.median(took), min(took), max(took)] if took else [None, None, None]
        rows.append([name, *map(_written, spread), str(len(took))])
    return rows


def _failures(found: ColdStarts) -> list[tuple[int, str]]:
    return [(number, start.failure) for number, start in enumerate(found.starts, 1) if start.failure]


def _row(number: int, start: Start) -> Row:
    ends: Sequence[float | None] = (
        start.port_open_s,
        start.ready_s,
        start.first_token_s,
        start.second_token_s,
    )
    spans, since = [], 0.0
    for kind, end in zip(STAGES, ends, strict=True):
        if end is not None:
            spans.append(Span(since, end, kind))
            since = end
    return Row(f"start {number}", spans, start.failure, bool(start.failure))


def _written(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
