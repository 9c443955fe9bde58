"""`ridgeline ps`: the servers and gateways of this user that run on this machine."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from ridgeline.cli.parsing import Verbs, add_verb
from ridgeline.running import RunRecord, running

DESCRIPTION = """\
List the servers and gateways that you started on this machine: process, state, address, models. Each keeps a
record in ~/.local/state/ridgeline/run while it runs."""

EXAMPLES = """\
  ridgeline ps
  ridgeline ps --json
"""

COLUMNS = ("PID", "KIND", "STATE", "UP", "URL", "MODELS")


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "ps", "list running servers and gateways", DESCRIPTION, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    records = running()
    if args.json:
        print(json.dumps([shown(record) for record in records], indent=2))
        return 0
    print(table(records, time.time()) if records else "No server or gateway is running: `ridgeline serve`.")
    return 0


def shown(record: RunRecord) -> dict[str, object]:
    names = ("pid", "kind", "state", "url", "names", "sources", "started_at", "version")
    return {name: value for name, value in asdict(record).items() if name in names}


def table(records: list[RunRecord], now: float) -> str:
    rows = [COLUMNS, *(row(record, now) for record in records)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def row(record: RunRecord, now: float) -> tuple[str, ...]:
    names = ", ".join(record.names)
    return str(record.pid), record.kind, record.state, age(now - record.started_at), record.url, names


def age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
