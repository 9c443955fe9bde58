"""A usage report of the command line: from the store or an admin API, as a table, CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ridgeline.gateway.accounting.admin_endpoints import csv_of, report_of
from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.store.places import JOURNALS, sqlite_ledger, sqlite_path, store_at
from ridgeline.gateway.accounting.store.reports import (
    MAX_LINES,
    Reports,
    UsageLine,
    total,
    usage_query,
)

_TIMEOUT_S = 60.0
_COLUMNS = ("requests", "answered", "tokens_in", "tokens_cached", "tokens_out", "cost_usd")
_HEADS = ("REQUESTS", "ANSWERED", "TOKENS IN", "CACHED", "TOKENS OUT", "USD")


class Report(msgspec.Struct, frozen=True):
    """From the admin API's answer, or from the store."""

    by: tuple[str, ...]
    data: list[UsageLine]
    waiting_rows: int = 0
    is_cut: bool = False


def read_usage(
    store_url: str, state_dir: Path, by: str, since: str | None, until: str | None, only: Mapping[str, str]
) -> Report:
    """Read directly from the store, without changes."""
    query = usage_query(by, since, until, only)
    root = state_dir / JOURNALS
    if store_url:
        reports = Reports(store_at(store_url, state_dir, _TIMEOUT_S), root)
    else:
        path = sqlite_path("", state_dir)
        if not path.exists():
            raise LedgerError(f"{path}: no such ledger; give --state-dir, --store or --admin-url")
        reports = Reports(sqlite_ledger(path, _TIMEOUT_S, read_only=True), root)
    try:
        lines = reports.usage(query)
        return Report(query.by, lines, reports.waiting(), len(lines) == MAX_LINES)
    finally:
        reports.close()


def written(report: Report, shape: str, names: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """`names`: of keys and teams by id, for the table."""
    if shape == "csv":
        return csv_of(report.by, report.data)
    if shape == "json":
        body = report_of(report.by, report.data, report.waiting_rows)
        return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
    return _table(report, names or {})


def _table(report: Report, names: Mapping[str, Mapping[str, str]]) -> str:
    heads = [*(name.upper() for name in report.by), *_HEADS]
    rows = [_cells(report.by, line, names) for line in report.data]
    if report.by:
        rows.append(_cells(report.by, total(report.data), names))
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    texts = len(report.by)

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip() + "\n"

    cut = f"(the first {MAX_LINES} lines)\n" if report.is_cut else ""
    return line(heads) + "".join(line(row) for row in rows) + cut


def _cells(by: Sequence[str], line: UsageLine, names: Mapping[str, Mapping[str, str]]) -> list[str]:
    groups = [_named(line.group.get(kind, ""), names.get(kind, {})) for kind in by]
    figures = [getattr(line, name) for name in _COLUMNS]
    texts = [f"{figure:,}" if isinstance(figure, int) else figure for figure in figures]
    return (groups if line.group else _total_cells(by)) + texts


def _named(value: str, names: Mapping[str, str]) -> str:
    return f"{names[value]} ({value})" if value in names else value or "-"


def _total_cells(by: Sequence[str]) -> list[str]:
    return ["total", *[""] * (len(by) - 1)] if by else []
