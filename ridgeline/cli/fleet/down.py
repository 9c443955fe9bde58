"""`ridgeline fleet down`: ends routers and replicas, also those that a killed controller left."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.fleet.control_client import ControlClient, NoController, add_fleet_flags, state_dir_of
from ridgeline.cli.parsing import Verbs, add_verb

DESCRIPTION = """\
End the fleet: routers accept no new connection, running requests have [fleet] drain_s to finish, then the
replicas end. Also ends replicas and routers whose controller was killed. Returns when all have ended."""

EXAMPLES = """\
  ridgeline fleet down
  ridgeline fleet down --config fleet.toml
"""
POLL_S = 0.1


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "down", "end the fleet", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="X",
        help="fail if the fleet has not ended after this many seconds (default: 600)",
    )
    add_fleet_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = ControlClient.of(args)
    try:
        client.post("/fleet/down", {})
    except NoController:
        if args.url is not None:
            raise
        return _end_left(args)
    until = time.monotonic() + args.timeout_s
    try:
        while time.monotonic() < until:
            client.get("/fleet/status")
            time.sleep(POLL_S)
    except NoController:
        print(f"the fleet at {client.where} has ended", file=sys.stderr)
        return 0
    raise RemoteError(f"the fleet at {client.where} is still running after {args.timeout_s:g} s")


def _end_left(args: argparse.Namespace) -> int:
    from ridgeline.fleet.config import FleetConfig, FleetSettings, read_fleet
    from ridgeline.fleet.config_substrates import LocalConfig
    from ridgeline.fleet.controller.cleanup import end_left
    from ridgeline.fleet.substrates.choice import make_substrate

    state_dir = state_dir_of(args)
    if args.config is not None:
        settings = read_fleet(args.config)
    else:
        settings = FleetSettings(FleetConfig(state_dir=state_dir), substrate_options=LocalConfig())
    ended = asyncio.run(end_left(state_dir, make_substrate(settings), settings.fleet.drain_s))
    if not ended:
        raise RemoteError(f"no fleet is running at {state_dir}")
    print(f"no controller was running; ended {', '.join(ended)}", file=sys.stderr)
    return 0
