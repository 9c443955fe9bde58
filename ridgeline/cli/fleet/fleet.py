"""`ridgeline fleet`: the group of verbs."""

from __future__ import annotations

import argparse

from ridgeline.cli.fleet import check, commands, down, place, status, up
from ridgeline.cli.parsing import VerbGroup, Verbs, add_verb

DESCRIPTION = """\
Run many replicas of one or more models as one service: `fleet up` starts the replicas that a file describes
and the routers in front of them, replaces replicas that die, scales them with the traffic, and rolls out new
settings without a failed request. The other verbs talk to the fleet running on this machine; choose another
one with --state-dir, --config or --url."""

EXAMPLES = """\
  ridgeline fleet up --print-example > fleet.toml
  ridgeline fleet up fleet.toml
  ridgeline fleet status
  ridgeline fleet scale chat 4
  ridgeline fleet roll                        # after a change of fleet.toml
  ridgeline fleet roll chat --set kv_tokens=8192
  ridgeline fleet events --follow
  ridgeline fleet down
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "fleet", "run many replicas as one service", DESCRIPTION, EXAMPLES)
    group = VerbGroup(parser)
    for verb in (up, check, status, commands, place, down):
        verb.add_parser(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    args.parser.print_help()
    return 2
