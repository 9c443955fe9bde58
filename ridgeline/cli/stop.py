"""`ridgeline stop`: ends a running server or gateway of this user, after its running answers."""

from __future__ import annotations

import argparse
import sys

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.parsing import Verbs, add_verb
from ridgeline.options import OptionError
from ridgeline.running import RunRecord, end, running

DESCRIPTION = """\
Stop servers and gateways that you started on this machine (`ridgeline ps`). They finish their running answers
first, for --drain-s at most. Without WHICH: the one that runs."""

EXAMPLES = """\
  ridgeline stop
  ridgeline stop 8000
  ridgeline stop smollm2-135m
  ridgeline stop --all
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "stop", "stop a running server or gateway", DESCRIPTION, EXAMPLES)
    parser.add_argument("which", nargs="*", metavar="WHICH", help="port, process number, URL or model")
    parser.add_argument("--all", action="store_true", help="stop all of them")
    parser.add_argument("--now", action="store_true", help="end a server without its running answers")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="X",
        help="fail if one still runs after this many seconds (default: 120)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.all and args.which:
        raise OptionError("give WHICH or --all, not both")
    chosen = choose(running(), args.which, all_of_them=args.all)
    if args.now and any(record.kind == "gateway" for record in chosen):
        raise OptionError("--now is for servers: a gateway always finishes its answers, within its --drain-s")
    for record in chosen:
        if not end(record, args.timeout_s, at_once=args.now):
            raise RemoteError(
                f"{named(record)} still runs after {args.timeout_s:g} s: it finishes running answers. Wait, "
                f"or end a server at once with `ridgeline stop --now {record.pid}`"
            )
        print(f"stopped {named(record)}", file=sys.stderr)
    return 0


def choose(records: list[RunRecord], words: list[str], *, all_of_them: bool = False) -> list[RunRecord]:
    """The records that the words name; without words, the only one."""
    if not records:
        raise RemoteError("no server or gateway of yours is running on this machine")
    if all_of_them:
        return records
    if not words and len(records) > 1:
        raise OptionError(f"{len(records)} are running: {listed(records)}. Say which, or give --all")
    if not words:
        return records
    return list(dict.fromkeys(_found(records, word) for word in words))


def _found(records: list[RunRecord], word: str) -> RunRecord:
    url = word.rstrip("/").removesuffix("/v1")
    found = [r for r in records if word in (r.port, str(r.pid), *r.names, *r.sources) or url == r.url]
    if not found:
        raise RemoteError(f"nothing that runs is {word!r}. Running: {listed(records)}")
    if len(found) > 1:
        raise OptionError(f"{word!r} may mean {listed(found)}: name it by its process number")
    return found[0]


def listed(records: list[RunRecord]) -> str:
    return ", ".join(named(record) for record in records)


def named(record: RunRecord) -> str:
    return f"{record.kind} {record.pid} ({record.url}, {', '.join(record.names)})"
