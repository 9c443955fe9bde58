"""`ridgeline fleet up`: reads fleet.toml and runs the controller, here or in the background."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from ridgeline.cli.errors import RemoteError
from ridgeline.cli.fleet.check import read_checked, warnings
from ridgeline.cli.fleet.control_client import ControlClient, NoController
from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.cli.progress import fetch
from ridgeline.fleet.config import FleetConfig, FleetSettings
from ridgeline.options import OptionError, add_flags, given_flags
from ridgeline.replica.weight_sources import HUB, WORDS
from ridgeline.telemetry import logs

DESCRIPTION = """\
Start the fleet of a file: its replicas, and routers on one port before them. Models are downloaded first.
The controller runs in the foreground; Ctrl-C lets running requests finish, then ends everything; a second
Ctrl-C ends it at once. With --detach it runs in the background, and the command returns when it serves.
Replicas and routers that a killed controller left running are adopted without a pause. Flags override the
[fleet] table."""

EXAMPLES = """\
  ridgeline fleet up --print-example > fleet.toml && ridgeline fleet up fleet.toml
  ridgeline fleet up fleet.toml --port 9000 --detach
  ridgeline fleet up fleet.toml --standby          # take over when the running controller ends
"""

EXAMPLE_FILE = """\
# ridgeline fleet up fleet.toml; every key: docs/fleet.md

[fleet]
port = 8080
routers = 1                       # processes that share the port

[[models]]
name = "chat"                     # the name in clients' requests
source = "smollm2-135m"           # MODEL of `ridgeline serve`
replicas = 2

[models.serve]                    # any option of `ridgeline serve`
kv_tokens = 16384

# [models.scaling]                # without it, the number of replicas is fixed
# min = 1                         # 0: scale to zero
# max = 4

# [models.rollout]
# surge = 1                       # new replicas beyond the wanted number
# canary = 0.1                    # share of all requests for the first new replica
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "up", "start the fleet of a file", DESCRIPTION, EXAMPLES)
    parser.add_argument("file", nargs="?", type=path_argument, metavar="FILE", help="fleet.toml")
    parser.add_argument("--detach", action="store_true", help="run in the background")
    parser.add_argument(
        "--standby", action="store_true", help="wait while another controller uses the state directory"
    )
    parser.add_argument("--print-example", action="store_true", help="print a small fleet.toml and exit")
    add_flags(parser, "fleet", FleetConfig, title="fleet")
    parser.set_defaults(run=run, logs_notes=True)


def run(args: argparse.Namespace) -> int:
    if args.print_example:
        print(EXAMPLE_FILE, end="")
        return 0
    if args.file is None:
        raise OptionError("name the file: `ridgeline fleet up fleet.toml`; --print-example prints an example")
    flags = given_flags(args, "fleet")

    def read() -> FleetSettings:
        return read_checked(args.file, flags)

    settings = read()
    logs.setup(settings.fleet.log_level, settings.fleet.log_format)
    for warning in warnings(settings):
        print(f"warning: {warning}", file=logs.for_people())
    if settings.substrate.kind == "local" and not settings.substrate_options.separate_caches:
        near = [model for model in settings.models if not set(model.weights.sources) - set(WORDS)]
        for source in dict.fromkeys(model.source for model in near if HUB in model.weights.sources):
            fetch(source, logs.for_people())  # once, not in every replica; a store comes before the hub
    if args.detach:
        return _detach(settings)
    from ridgeline.fleet.controller.main import run as control

    return control(settings, read, args.standby)


def _detach(settings: FleetSettings) -> int:
    """Start the same command in the background, and show its events until every replica serves."""
    folder = settings.state_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "controller.log"
    arguments = [one for one in sys.argv[1:] if one != "--detach"]
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = ControlClient(settings.state_dir)
    seen = -1
    while True:
        if process.poll() is not None:
            raise RemoteError(f"the controller ended: {_last_line(path)}")
        try:
            status = client.get("/fleet/status")
            if status["pid"] == process.pid:
                for event in client.get("/fleet/events", after=max(seen, 0))["events"] if seen >= 0 else ():
                    print(f"  {event['text']}", flush=True)
                    seen = event["id"]
                seen = max(seen, 0) if seen >= 0 else _first(client)
                if all(model["serving"] >= model["target"] for model in status["models"]):
                    print(f"serving on {status['url']}; log: {path}; end it with `ridgeline fleet down`")
                    return 0
        except NoController:
            pass
        time.sleep(0.2)


def _first(client: ControlClient) -> int:
    """The number of the newest event: earlier ones may come from an earlier controller."""
    events = client.get("/fleet/events", after=-1)["events"]
    return int(events[-1]["id"]) if events else 0


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {path}"
