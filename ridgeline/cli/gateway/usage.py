"""`ridgeline gateway usage`: usage and cost of a gateway's requests, by key, team, model, day.

Reads the gateway's store, or calls a running gateway's admin API; the store computes the sums.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import Verbs, add_verb, path_argument

if TYPE_CHECKING:
    from ridgeline.cli.gateway.admin_client import AdminClient
    from ridgeline.gateway.accounting.store.report_text import Report
    from ridgeline.gateway.tenants.names import Names

DESCRIPTION = """\
Sums of a gateway's ledger: requests, tokens and US dollars, exact to the token and the picodollar. Reads
the store itself (SQLite in the state directory, or --store), or asks the admin API (--admin-url). The table
has the names of keys and teams beside their ids; CSV and JSON have the ids, which never change."""

EXAMPLES = """\
  ridgeline gateway usage
  ridgeline gateway usage --by team,model --since 30d
  ridgeline gateway usage --by day --key app --since 2026-11-01 --until 2026-11-30 --csv > november.csv
  ridgeline gateway usage --store postgresql://ridgeline@db/ridgeline --json
"""

FILTERS = ("key", "team", "model", "upstream")
STATE_DIR = "that of the gateway that runs on this machine, else ~/.local/state/ridgeline/gateway"


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(
        verbs, "usage", "show tokens and cost by key, team, model or day", DESCRIPTION, EXAMPLES
    )
    parser.add_argument(
        "--by",
        metavar="NAMES",
        default="key",
        help="key, team, model, upstream, endpoint, outcome, day: one, or several with commas (default: key)",
    )
    parser.add_argument("--since", metavar="TIME", help="2026-11-01, 2026-11-01T08:00Z, or an age: 36h, 7d")
    parser.add_argument("--until", metavar="TIME", help="likewise; a day is included")
    for name in FILTERS:
        by = ", by its name or id" if name in ("key", "team") else ""
        parser.add_argument(f"--{name}", metavar="NAME", help=f"only this {name}{by}")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print CSV")
    shape.add_argument("--json", action="store_true", help="print JSON, with the total")
    source = parser.add_argument_group("source")
    source.add_argument(
        "--state-dir", metavar="DIR", type=path_argument, help=f"the gateway's (default: {STATE_DIR})"
    )
    source.add_argument("--store", metavar="URL", default="", help="postgresql://…, as [store] url has it")
    source.add_argument(
        "--admin-url",
        metavar="URL",
        help="ask a running gateway's admin API instead (default: $RIDGELINE_ADMIN_URL)",
    )
    source.add_argument(
        "--admin-key-file",
        metavar="FILE",
        type=path_argument,
        help="its key (default: $RIDGELINE_ADMIN_KEY_FILE, or admin-key in the state directory)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ridgeline.gateway.accounting.store.report_text import written

    report, names = _asked(args) if _admin_url(args) else _read(args)
    sys.stdout.write(written(report, "csv" if args.csv else "json" if args.json else "table", names))
    if report.waiting_rows:
        print(
            f"{report.waiting_rows} more rows in write-ahead files are not in the store yet", file=sys.stderr
        )
    return 0


def _read(args: argparse.Namespace) -> tuple[Report, Names]:
    from ridgeline.gateway.accounting.store.report_text import read_usage
    from ridgeline.gateway.tenants.names import read_names

    names = read_names(args.store, _state_dir(args))
    only = _only(args, names)
    return read_usage(args.store, _state_dir(args), args.by, args.since, args.until, only), names


def _asked(args: argparse.Namespace) -> tuple[Report, Names]:
    import msgspec

    from ridgeline.cli.gateway.admin_client import AdminClient, key_file_of
    from ridgeline.gateway.accounting.store.report_text import Report
    from ridgeline.running import running_gateway

    url = _admin_url(args)
    gateway = None if args.state_dir else running_gateway(url.rstrip("/"))
    client = AdminClient(url, args.admin_key_file or key_file_of(gateway, _state_dir(args)))
    names = _names_of(client)
    answer = client.get("/admin/usage", by=args.by, since=args.since, until=args.until, **_only(args, names))
    return msgspec.convert(answer, Report), names


def _names_of(client: AdminClient) -> Names:
    return {
        "key": {one["id"]: one["name"] for one in client.every("/admin/keys", revoked="true")},
        "team": {one["id"]: one["name"] for one in client.every("/admin/teams")},
    }


def _admin_url(args: argparse.Namespace) -> str:
    """--store and --state-dir take precedence over the environment."""
    if args.admin_url or args.store or args.state_dir:
        return args.admin_url or ""
    return os.environ.get("RIDGELINE_ADMIN_URL", "")


def _state_dir(args: argparse.Namespace) -> Path:
    """The flag's; else that of the only gateway that runs; else the default."""
    from ridgeline.running import running_gateway, state_home

    if args.state_dir:
        return Path(args.state_dir)
    gateway = running_gateway()
    return state_home() / "gateway" if gateway is None else Path(gateway.state_dir)


def _only(args: argparse.Namespace, names: Names) -> dict[str, str]:
    given = {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
    return {kind: _id_of(kind, value, names.get(kind, {})) for kind, value in given.items()}


def _id_of(kind: str, value: str, names: dict[str, str]) -> str:
    """The id of the key or team of this name; other values and ids are returned unchanged."""
    if kind not in ("key", "team") or value in names or value == "anonymous":
        return value
    found = [id for id, name in names.items() if name == value]
    if len(found) > 1:
        raise RemoteError(f"{len(found)} {kind}s are named {value!r}; use an id ({', '.join(found[:5])})")
    if not found and not value.startswith(f"{kind}_"):
        raise RemoteError(f"no {kind} is named {value!r}; `ridgeline gateway {kind}s list` lists them")
    return found[0] if found else value
