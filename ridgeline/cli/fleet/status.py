"""`ridgeline fleet status`: a live table of models and replicas."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ridgeline.cli.fleet.control_client import ControlClient, add_fleet_flags
from ridgeline.cli.parsing import Verbs, add_verb

DESCRIPTION = """\
Show the fleet: for each replica its state, age, load, tokens per second with the limit of its machine, KV
memory, prefix hits, and the parts of its start. On a terminal the table refreshes until Ctrl-C.

  place      region and pool, where the replicas have one
  load       running / waiting requests, and prompt tokens that are not computed yet
  tok/s      output tokens per second over 5 s, the machine's limit for the requests that run, and the share;
             ~ marks a limit that is uncertain
  KV         share of KV memory that requests hold
  prefix     share of prompt tokens found in the cache
  weights    source of the weights, bandwidth of the transfer, and the link's limit where it is known
  start      seconds of each part of the start"""

EXAMPLES = """\
  ridgeline fleet status
  ridgeline fleet status --once
  ridgeline fleet status --json | jq '.replicas[] | {id, state, running}'
"""
COLUMNS = ("replica", "state", "age", "load", "tok/s", "KV", "prefix", "weights", "start")


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "status", "show models and replicas", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--once", action="store_true", help="print once (default if stdout is not a terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print once, as JSON")
    parser.add_argument(
        "--every-s", type=float, default=1.0, metavar="X", help="seconds between two tables (default: 1)"
    )
    add_fleet_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = ControlClient.of(args)
    status = client.get("/fleet/status")
    if args.json:
        print(json.dumps(status, indent=2))
        return 0
    if args.once or not sys.stdout.isatty():
        _console().print(*_shown(status), sep="\n")
        return 0
    from rich.console import Group
    from rich.live import Live

    try:
        with Live(Group(*_shown(status)), console=_console(), auto_refresh=False) as live:
            while True:
                time.sleep(args.every_s)
                live.update(Group(*_shown(client.get("/fleet/status"))), refresh=True)
    except KeyboardInterrupt:
        return 0


def _console() -> Any:
    from rich.console import Console

    # Without a terminal no line is truncated or wrapped.
    return Console(width=None if sys.stdout.isatty() else 400, highlight=False)


def _shown(status: dict[str, Any]) -> list[Any]:
    """The models' lines and the table of replicas."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    replicas = status["replicas"]
    has_places = any(one["region"] or one["pool"] for one in replicas)
    titles = (*COLUMNS[:1], "place", *COLUMNS[1:]) if has_places else COLUMNS
    table = Table(*titles, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for one in replicas:
        id, *cells = replica_row(one)
        place = ["/".join(filter(None, (one["region"], one["pool"])))] if has_places else []
        table.add_row(*(Text(cell) for cell in (id, *place, *cells)))
    head = (
        f"{status['url']} · up {age(status['up_s'])} · {status['routers_reporting']} of {status['routers']} "
        f"routers report · table {status['generation']}" + (" · stopping" if status["stopping"] else "")
    )
    lines = [head, *supply_lines(status)]
    lines += [*(line for model in status["models"] for line in model_lines(model)), ""]
    notes = limit_notes(replicas)
    shown = [*(Text(line) for line in lines), table if replicas else Text("no replica is running")]
    return [*shown, *(Text(line) for line in (["", *notes] if notes else []))]


def supply_lines(status: dict[str, Any]) -> list[str]:
    """What the substrate has, and what replicas that name their needs reserve of it."""
    has, reserved = (_amounts(status.get(name) or {}) for name in ("capacity", "reserved"))
    if not has:  # not known, or an older controller
        return []
    return [f"capacity: {has}" + (f"; replicas reserve {reserved}" if reserved else "")]


def _amounts(of: dict[str, Any]) -> str:
    units = {"cpus": "CPUs", "memory": "GiB", "gpus": "GPUs"}
    return ", ".join(f"{of[name]:.4g} {unit}" for name, unit in units.items() if of.get(name))


def model_lines(model: dict[str, Any]) -> list[str]:
    starting = f", {model['starting']} starting" if model["starting"] else ""
    line = f"{model['name']}: {model['serving']} of {model['target']} serve{starting}"
    line += f", version {model['version']}"
    if model["rollout"]:
        awaits = model.get("rollout_awaits")  # an older controller does not say it
        line += f"; rollout to {model['rollout_to']}: {model['rollout']}" + (f" ({awaits})" if awaits else "")
    elif model["last_rollout"]:
        line += f"; last rollout {model['last_rollout']}"
    if model.get("moving"):  # an older controller does not say it
        line += f"; {model['moving']} replicas move to other places"
    lines = [line]
    if model["blocked"]:
        lines.append(f"  {'crash loop' if model['crash_loop'] else 'waits'}: {model['blocked']}")
    if model["explained"]:
        lines.append(f"  autoscaler: {model['explained']}")
    return lines + [f"  warning: {warning}" for warning in model["warnings"]]


def replica_row(one: dict[str, Any]) -> tuple[str, ...]:
    state = one["state"]
    if one["weight"] != 1:
        state += f" ({one['weight']:.0%} of a replica's share)"
    if one["state"] in ("starting", "lost", "draining") and one["reason"]:
        state += f": {one['reason'][:60]}"
    load = f"{one['running']}/{one['waiting']}"
    if one["queued_tokens"]:
        load += f" +{one['queued_tokens']:,} tok"
    held = f"{one['kv_blocks_held'] / one['kv_blocks']:.0%}" if one["kv_blocks"] else "-"
    hits = f"{one['prefix_hits'] / one['prefix_queries']:.0%}" if one["prefix_queries"] else "-"
    start = _segments(one["segments"])
    return (one["id"], state, age(one["age_s"]), load, _rate(one), held, hits, weights_text(one), start)


def weights_text(one: dict[str, Any]) -> str:
    """Such as `106 MB from peer chat-1, 412 MB/s of 1250; packed weights from peer chat-1`."""
    weights = one["weights"]
    if weights is None:
        return "-"
    text = str(weights["source"])
    size, limit = weights["bytes"], weights["limit_bytes_per_s"]
    if size and weights["seconds"]:
        text = f"{size / 1e6:.0f} MB from {text}, {size / weights['seconds'] / 1e6:.0f} MB/s"
        text += f" of {limit / 1e6:.0f}" if limit else ""
    cache = weights["cache"]
    if cache is None:
        return text
    if cache["refused"]:
        return f"{text}; no {cache['kind']}: {cache['refused'][:80]}"
    origin = "local" if cache["source"] == "local" else f"from {cache['source']}"
    return f"{text}; {cache['kind']} {origin}"


def _rate(one: dict[str, Any]) -> str:
    rate, limit = one["output_tokens_per_s"], one["limit_tokens_per_s"]
    if limit is None:
        return f"{rate:.0f}"
    if rate > limit:
        return f"{rate:.0f} of ~{limit:.0f}"
    about = "~" if _is_uncertain(one) else ""
    return f"{rate:.0f} of {about}{limit:.0f} ({about}{rate / limit:.0%})"


def limit_notes(replicas: list[dict[str, Any]]) -> list[str]:
    """Why limits are marked with ~; no line if none is."""
    marked = [one["id"] for one in replicas if one["limit_tokens_per_s"] is not None and _is_uncertain(one)]
    if not marked:
        return []
    return [
        f"~: the limit of {', '.join(marked)} is uncertain, probably too low: the machine was busy when it "
        "was measured; run `ridgeline doctor --calibrate` on an idle one, then restart the replica",
    ]


def _is_uncertain(one: dict[str, Any]) -> bool:
    """Whether its limit was measured on a busy machine, or the replica is faster than its limit."""
    from ridgeline.engine.limits.steady import UNCERTAIN

    is_exceeded = one["output_tokens_per_s"] > one["limit_tokens_per_s"]
    return bool(is_exceeded or one["limit_uncertainty"] > UNCERTAIN)


def _segments(segments: dict[str, float]) -> str:
    """In the order of the start: the first token is last, whichever report came first."""
    ordered = sorted(segments.items(), key=lambda part: part[0] == "first_token")
    parts = [f"{name} {spent:.2f}" for name, spent in ordered if name != "total" and spent >= 0.005]
    total = f"{segments['total']:.2f} s: " if "total" in segments else ""
    return total + " · ".join(parts)


def age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"
