"""`ridgeline fleet scale | roll | drain | events | logs`: each sends one request to the controller."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Mapping
from typing import Any

from ridgeline.cli.fleet.control_client import ControlClient, add_fleet_flags
from ridgeline.cli.parsing import Verbs, add_verb
from ridgeline.options import OptionError

SCALE = """\
Set the number of replicas of a model, within the limits of fleet.toml. With [models.scaling], the
autoscaler may change it again. A replica that is removed finishes its requests first."""

ROLL = """\
Replace the replicas of a model by replicas with the settings of the changed fleet.toml, or of --set, without
a failed request. First one new replica, the canary, gets a small share of requests. It is compared with the
old version: more errors or a longer time to first token roll back. [models.rollout] has the limits. New
models of fleet.toml start, and models that were removed from it are drained. The command returns at once;
`ridgeline fleet status` shows the rollout, and --wait waits for its end, and for replicas that move to other
places."""

DRAIN = """\
Drain one replica: it gets no new request, finishes its running ones, and ends. The controller starts another
one if the target needs it."""

EVENTS = "Show every decision of the controller with its reason: starts, losses, scaling, rollouts."

LOGS = "Show the end of a replica's log."


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "scale", "set the number of replicas", SCALE, "  ridgeline fleet scale chat 4\n")
    parser.add_argument("model", metavar="MODEL", help="name or alias of the model in fleet.toml")
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
        help="an option of `ridgeline serve`, or source=MODEL; repeatable. fleet.toml is not changed",
    )
    parser.add_argument("--back", action="store_true", help="roll the current rollout back")
    parser.add_argument("--wait", action="store_true", help="wait for the end; exit code 1 after a rollback")
    add_fleet_flags(parser)
    parser.set_defaults(run=roll)

    parser = add_verb(
        verbs, "drain", "end one replica after its requests", DRAIN, "  ridgeline fleet drain chat-3\n"
    )
    parser.add_argument("replica", metavar="REPLICA", help="its id, as in `ridgeline fleet status`")
    add_fleet_flags(parser)
    parser.set_defaults(run=drain)

    examples = "  ridgeline fleet events -n 20\n  ridgeline fleet events --follow --model chat\n"
    examples += "  ridgeline fleet events --explain --model chat\n"
    parser = add_verb(verbs, "events", "show the controller's decisions", EVENTS, examples)
    parser.add_argument(
        "-n", "--last", type=int, default=50, metavar="N", help="show the last N events (default: 50)"
    )
    parser.add_argument("--model", metavar="MODEL", help="show only events of this model")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-f", "--follow", action="store_true", help="keep running and show new events")
    mode.add_argument(
        "--explain",
        action="store_true",
        help="show every decision of the autoscaler with its reasons; equal ones in a row are one line",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, with all figures"
    )
    add_fleet_flags(parser)
    parser.set_defaults(run=events)

    parser = add_verb(verbs, "logs", "show a replica's log", LOGS, "  ridgeline fleet logs chat-3\n")
    parser.add_argument("replica", metavar="REPLICA", help="its id, as in `ridgeline fleet status`")
    parser.add_argument(
        "--bytes", type=int, default=65536, metavar="N", help="show the last N bytes (default: 65536)"
    )
    add_fleet_flags(parser)
    parser.set_defaults(run=logs)


def scale(args: argparse.Namespace) -> int:
    done = ControlClient.of(args).post("/fleet/scale", {"model": args.model, "replicas": args.replicas})
    note = f" ({done['note']})" if done["note"] else ""
    print(f"{done['model']}: from {done['before']} to {done['replicas']} replicas{note}")
    return 0


def roll(args: argparse.Namespace) -> int:
    if args.back and args.set:
        raise OptionError("use either --back or --set, not both")
    client = ControlClient.of(args)
    options = settings_of(args.set or [])
    if options:
        from ridgeline.cli.fleet.check import check_serve

        check_serve({name: value for name, value in options.items() if name != "source"}, "--set ")
    done = client.post("/fleet/roll", {"model": args.model, "set": options, "back": args.back})
    for one in done["rolling"]:
        print(f"{one['model']}: rolling from {one['from']} to {one['to']}")
    for name in done.get("added", []):
        print(f"{name}: added; its replicas start")
    for name in done.get("removed", []):
        print(f"{name}: removed; its replicas drain")
    for one in done.get("moving", []):
        print(f"{one['model']}: {one['replicas']} replicas move to {', '.join(one['places'])}")
    for name in done.get("applied", []):
        print(f"{name}: applied")
    if not any(done.values()):
        print("nothing to roll out: every replica already runs the settings of fleet.toml")
        return 0
    return wait_for(client, done) if args.wait else 0


def settings_of(given: list[str]) -> dict[str, Any]:
    """Read OPTION=VALUE. VALUE is TOML, or else a text."""
    found: dict[str, Any] = {}
    for word in given:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise OptionError(f"--set {word!r} is not OPTION=VALUE")
        try:
            found[name.replace("-", "_")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.replace("-", "_")] = text
    return found


def wait_for(client: ControlClient, done: Mapping[str, Any]) -> int:
    """Wait until rollouts and moves have ended. done: the controller's answer to /fleet/roll."""
    rolled = [one["model"] for one in done["rolling"]]
    moved = {one["model"]: one["replicas"] for one in done.get("moving", [])}
    names = dict.fromkeys([*rolled, *moved])
    shown: dict[str, tuple[str, bool]] = {}
    while True:
        models = {one["name"]: one for one in client.get("/fleet/status")["models"]}
        for name in names:
            state = _progress(models[name], name in rolled, moved.get(name, 0))
            awaits = models[name].get("rollout_awaits")  # an older controller does not say it
            if shown.get(name) != (state, bool(awaits)):
                shown[name] = state, bool(awaits)
                print(f"{name}: {state}" + (f" ({awaits})" if awaits else ""), flush=True)
        moving = [name for name, count in moved.items() if _is_moving(models[name], count)]
        if not moving and not any(models[name]["rollout"] for name in rolled):
            return 1 if any("rolled_back" in models[name]["last_rollout"] for name in rolled) else 0
        time.sleep(0.3)


def _is_moving(model: Mapping[str, Any], count: int) -> bool:
    """count: replicas that had to move. Those that the autoscaler wants beside them are not waited for."""
    return bool(model["moving"]) or model["serving"] < min(model["target"], count)


def _progress(model: Mapping[str, Any], rolls: bool, moves: int) -> str:
    if model["rollout"]:
        return str(model["rollout"])
    parts = [str(model["last_rollout"])] if rolls else []
    if moves and not _is_moving(model, moves):
        parts.append(f"{model['serving']} replicas serve at its places")
    elif moves:
        blocked = f" ({model['blocked']})" if model["blocked"] else ""
        move = f"{model['moving']} replicas still move" if model["moving"] else "the new replicas start"
        parts.append(move + blocked)
    return "; ".join(parts)


def drain(args: argparse.Namespace) -> int:
    done = ControlClient.of(args).post("/fleet/drain", {"replica": args.replica})
    print(f"{done['replica']} drains: running requests have {done['drain_s']:g} s to finish")
    return 0


def events(args: argparse.Namespace) -> int:
    client = ControlClient.of(args)
    query = {"after": -max(args.last, 1), "model": args.model}
    if args.explain:
        found = client.get("/fleet/decisions", last=max(args.last, 1), model=args.model)["decisions"]
        for entry in found:
            _print_decisions(entry, args.json)
        if not found and not args.json:
            print("no decision yet: the autoscaler decides for models with a [models.scaling] table")
    elif args.follow:
        for event in client.lines("/fleet/events", follow=1, **query):
            _print_event(event, args.json)
    else:
        for event in client.get("/fleet/events", **query)["events"]:
            _print_event(event, args.json)
    return 0


def _print_decisions(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry), flush=True)
        return
    times = [time.localtime(entry[name]) for name in ("first_at", "last_at")]
    at = time.strftime("%Y-%m-%d %H:%M:%S", times[0])
    if entry["count"] > 1:
        at += f" to {time.strftime('%H:%M:%S', times[1])}, {entry['count']:,} times"
    print(f"{at}  {entry['model']}: {entry['text']}", flush=True)


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
