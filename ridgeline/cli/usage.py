"""`ridgeline usage`: what requests through the gateway used and cost, by key, team, model, day.

Reads the gateway's store, or asks a running gateway's admin API; sums are the store's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.parsing import Verbs, add_verb, path_argument

if TYPE_CHECKING:
    from ridgeline.gateway.accounting.report_text import Report

DESCRIPTION = """\
Sums of a gateway's ledger: requests, tokens and US dollars, exact to the token and the picodollar. Reads
the store itself (SQLite in the state directory, or --store), or asks the admin API (--admin-url)."""

EXAMPLES = """\
  ridgeline usage
  ridgeline usage --by team,model --since 30d
  ridgeline usage --by day --key key_7f3a --since 2026-11-01 --until 2026-11-30 --csv > november.csv
  ridgeline usage --store postgresql://ridgeline@db/ridgeline --json
"""

FILTERS = ("key", "team", "model", "upstream")
STATE_DIR = "~/.local/state/ridgeline/gateway"


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "usage", "what was used through a gateway, and its cost", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--by",
        metavar="NAMES",
        default="key",
        help="key, team, model, upstream, endpoint, outcome, day: one, or several with commas (default: key)",
    )
    parser.add_argument("--since", metavar="TIME", help="2026-11-01, 2026-11-01T08:00Z, or an age: 36h, 7d")
    parser.add_argument("--until", metavar="TIME", help="likewise; a day counts whole")
    for name in FILTERS:
        parser.add_argument(f"--{name}", metavar="NAME", help=f"this {name} alone")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print CSV")
    shape.add_argument("--json", action="store_true", help="print JSON, with the total")
    source = parser.add_argument_group("where it is read")
    source.add_argument(
        "--state-dir", metavar="DIR", type=path_argument, help=f"the gateway's (default: {STATE_DIR})"
    )
    source.add_argument("--store", metavar="URL", default="", help="postgresql://…, as [store] url has it")
    source.add_argument("--admin-url", metavar="URL", help="ask a running gateway's admin API instead")
    source.add_argument(
        "--admin-key-file",
        metavar="FILE",
        type=path_argument,
        help="its key (default: in the state directory)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.gateway.accounting.report_text import written

    report = _asked(args) if args.admin_url else _read(args)
    sys.stdout.write(written(report, "csv" if args.csv else "json" if args.json else "table"))
    if report.waiting_rows:
        print(f"{report.waiting_rows} more rows wait in write-ahead files to be moved", file=sys.stderr)
    return 0


def _read(args: argparse.Namespace) -> Report:
    from ridgeline.gateway.accounting.report_text import read_usage

    return read_usage(args.store, _state_dir(args), args.by, args.since, args.until, _only(args))


def _asked(args: argparse.Namespace) -> Report:
    import msgspec

    from ridgeline.cli.admin_client import AdminClient
    from ridgeline.gateway.accounting.report_text import Report

    client = AdminClient(args.admin_url, args.admin_key_file or _state_dir(args) / "admin-key")
    answer = client.get("/admin/usage", by=args.by, since=args.since, until=args.until, **_only(args))
    return msgspec.convert(answer, Report)


def _state_dir(args: argparse.Namespace) -> Path:
    return args.state_dir or path_argument(STATE_DIR)


def _only(args: argparse.Namespace) -> dict[str, str]:
    return {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
