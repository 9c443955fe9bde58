"""`ridgeline fleet scale | roll | drain | events | logs`: one request to the controller each."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from typing import Any

from ridgeline.cli.fleet.control_client import ControlClient, add_fleet_flags
from ridgeline.cli.parsing import Verbs, add_verb
from ridgeline.options import OptionError

SCALE = """\
Set the number of replicas of a model. It is kept within what fleet.toml allows. With [models.scaling], the
autoscaler goes on from there. Replicas that are no longer wanted finish their requests first."""

ROLL = """\
Replace the replicas of a model by ones with other settings, without a failed request: those of the changed
fleet.toml, or of --set. First one new replica, the canary, gets a small share of requests. It is compared
with the old version; more errors or a longer time to first token turn the rollout back. [models.rollout] has
the limits. The command returns at once; `ridgeline fleet status` shows the rollout, --wait waits."""

DRAIN = """\
Drain one replica: it gets no new request, finishes those that run, and ends. Another one takes its place if
it is still wanted."""

EVENTS = "Every decision of the controller with its explanation: starts, losses, scaling, rollouts."

LOGS = "The end of a replica's log."


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "scale", "set the number of replicas", SCALE, "  ridgeline fleet scale chat 4\n")
    parser.add_argument("model", metavar="MODEL", help="its name or an alias in fleet.toml")
    parser.add_argument("replicas", type=int, metavar="N", help="replicas")
    add_fleet_flags(parser)
    parser.set_defaults(run=scale)

    examples = (
        "  ridgeline fleet roll\n  ridgeline fleet roll chat --set kv_tokens=8192 --wait\n"
        "  ridgeline fleet roll chat --back\n"
    )
    parser = add_verb(verbs, "roll", "roll out new settings", ROLL, examples)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: every model that changed")
    parser.add_argument(
        "--set",
        action="append",
        metavar="OPTION=VALUE",
        help="an option of `ridgeline serve`, or source=MODEL; repeatable. The file keeps its value",
    )
    parser.add_argument("--back", action="store_true", help="turn the rollout under way back")
    parser.add_argument("--wait", action="store_true", help="wait for its end; exit code 1 if it went back")
    add_fleet_flags(parser)
    parser.set_defaults(run=roll)

    parser = add_verb(verbs, "drain", "end one replica gently", DRAIN, "  ridgeline fleet drain chat-3\n")
    parser.add_argument("replica", metavar="REPLICA", help="its id, as in `ridgeline fleet status`")
    add_fleet_flags(parser)
    parser.set_defaults(run=drain)

    examples = "  ridgeline fleet events -n 20\n  ridgeline fleet events --follow --model chat\n"
    parser = add_verb(verbs, "events", "show what the controller decided", EVENTS, examples)
    parser.add_argument("-n", "--last", type=int, default=50, metavar="N", help="the last N (default: 50)")
    parser.add_argument("--model", metavar="MODEL", help="of this model only")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new ones")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, with all figures")
    add_fleet_flags(parser)
    parser.set_defaults(run=events)

    parser = add_verb(verbs, "logs", "show a replica's log", LOGS, "  ridgeline fleet logs chat-3\n")
    parser.add_argument("replica", metavar="REPLICA", help="its id, as in `ridgeline fleet status`")
    parser.add_argument("--bytes", type=int, default=65536, metavar="N", help="the last N (default: 65536)")
    add_fleet_flags(parser)
    parser.set_defaults(run=logs)


def scale(args: argparse.Namespace) -> int:
    done = ControlClient.of(args).post("/fleet/scale", {"model": args.model, "replicas": args.replicas})
    note = f" ({done['note']})" if done["note"] else ""
    print(f"{done['model']}: from {done['before']} to {done['replicas']} replicas{note}")
    return 0


def roll(args: argparse.Namespace) -> int:
    if args.back and args.set:
        raise OptionError("give --back or --set, not both")
    client = ControlClient.of(args)
    options = settings_of(args.set or [])
    if options:
        from ridgeline.cli.fleet.check import check_serve

        check_serve({name: value for name, value in options.items() if name != "source"}, "--set ")
    done = client.post("/fleet/roll", {"model": args.model, "set": options, "back": args.back})
    for one in done["rolling"]:
        print(f"{one['model']}: rolling from {one['from']} to {one['to']}")
    if not done["rolling"]:
        print("nothing to roll out: every replica runs the settings of the file")
        return 0
    return _wait(client, [one["model"] for one in done["rolling"]]) if args.wait else 0


def settings_of(given: list[str]) -> dict[str, Any]:
    """OPTION=VALUE, with VALUE as in TOML, or else a text."""
    found: dict[str, Any] = {}
    for word in given:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise OptionError(f"--set {word!r}: write OPTION=VALUE")
        try:
            found[name.replace("-", "_")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.replace("-", "_")] = text
    return found


def _wait(client: ControlClient, names: list[str]) -> int:
    shown: dict[str, str] = {}
    while True:
        models = {one["name"]: one for one in client.get("/fleet/status")["models"]}
        for name in names:
            state = models[name]["rollout"] or models[name]["last_rollout"]
            if shown.get(name) != state:
                shown[name] = state
                print(f"{name}: {state}", flush=True)
        if not any(models[name]["rollout"] for name in names):
            return 1 if any("rolled_back" in models[name]["last_rollout"] for name in names) else 0
        time.sleep(0.3)


def drain(args: argparse.Namespace) -> int:
    done = ControlClient.of(args).post("/fleet/drain", {"replica": args.replica})
    print(f"{done['replica']} drains: requests that run have {done['drain_s']:g} s")
    return 0


def events(args: argparse.Namespace) -> int:
    client = ControlClient.of(args)
    query = {"after": -max(args.last, 1), "model": args.model}
    if args.follow:
        for event in client.lines("/fleet/events", follow=1, **query):
            _print_event(event, args.json)
    else:
        for event in client.get("/fleet/events", **query)["events"]:
            _print_event(event, args.json)
    return 0


def _print_event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    print(f"{at}  {event['kind']:<8} {event['text']}", flush=True)


def logs(args: argparse.Namespace) -> int:
    text = ControlClient.of(args).read("/fleet/logs", replica=args.replica, bytes=args.bytes)
    sys.stdout.write(text.decode(errors="replace"))
    return 0
