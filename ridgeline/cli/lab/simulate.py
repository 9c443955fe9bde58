"""`ridgeline simulate fleet`: what a fleet does with a trace, by its own classes and a simulated clock."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import add_flags, build, given_flags

if TYPE_CHECKING:
    from ridgeline.lab.simulate.fleet.loop import OnProgress

DEFAULT_SLO = "ttft_p90=1s,tpot_p90=50ms"
LINE_EVERY_S = 5.0
POLICIES = "round-robin,least-loaded,prefix,default"

DESCRIPTION = """\
Simulate a fleet under a trace: the fleet's own router, queue, autoscaler and rollout classes with a
simulated clock; each replica is the engine's own scheduler and KV pool with predicted step times. Prints SLO
attainment, cost and a comparison of routing policies, with intervals over seeds. Exact up to 1,000 replicas;
a larger fleet is projected, and the output says so."""

EXAMPLES = """\
  ridgeline simulate fleet fleet.toml --trace mooncake:conversation_trace.jsonl --window-s 600
  ridgeline simulate fleet fleet.toml --trace azure:AzureLLMInferenceTrace_conv.csv --speed 4 --seeds 5
  ridgeline simulate fleet fleet.toml --rate 20 --requests 2000 --policies round-robin,default
  ridgeline simulate fleet fleet.toml --rate 20 --requests 2000 --roll-at-s 30 --json
"""


def add_parser(verbs: Verbs) -> None:
    from ridgeline.lab.simulate.fleet.replica_options import ReplicaOptions

    parser = add_verb(verbs, "simulate", "simulate a fleet under a trace", DESCRIPTION, EXAMPLES)
    parser.add_argument("what", choices=["fleet"], help="what to simulate")
    parser.add_argument("file", metavar="FILE", type=path_argument, help="the fleet's fleet.toml")
    parser.add_argument("--model", metavar="NAME", default="", help="model of a fleet that has several")
    parser.add_argument("--replicas", type=int, metavar="N", help="replicas instead of the file's number")
    parser.add_argument("--routers", type=int, metavar="N", help="routers instead of the file's number")
    parser.add_argument(
        "--policies", default=POLICIES, metavar="NAME,NAME", help=f"policies to compare (default: {POLICIES})"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each policy (default: 3)")
    parser.add_argument(
        "--slo", default=DEFAULT_SLO, metavar="LIMITS", help=f"latency limits (default: {DEFAULT_SLO})"
    )
    parser.add_argument(
        "--roll-at-s", type=float, metavar="X", help="roll out a new version at this second of the traffic"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--trace", metavar="KIND:FILE", help="trace to replay: the same as --traffic")
    add_flags(parser, "replica", ReplicaOptions, title="each replica", skip=("max_context",))
    add_flags(parser, "traffic", TrafficOptions, title="the traffic")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ridgeline.fleet.config import read_fleet
    from ridgeline.fleet.routing.policy import POLICIES as KNOWN
    from ridgeline.lab.simulate.fleet.compare import compare
    from ridgeline.lab.simulate.fleet.from_file import model_of, setup_of
    from ridgeline.lab.simulate.fleet.replica_options import ReplicaOptions
    from ridgeline.lab.simulate.fleet.report import report
    from ridgeline.lab.slo import parse_slo
    from ridgeline.lab.traffic.operations import clipped
    from ridgeline.lab.traffic.source import build_traffic

    given = given_flags(args, "traffic")
    if args.trace is not None:
        if "traffic" in given:
            raise BadInput("--trace and --traffic are one setting; give one of them")
        given["traffic"] = args.trace
    traffic_options = build(TrafficOptions, given)
    if traffic_options.traffic is None and traffic_options.rate is None:
        raise BadInput("give a --trace, or a --rate: a fleet is simulated under traffic with arrival times")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    for name in policies:
        if name not in KNOWN:
            raise BadInput(f"unknown policy {name!r}; known: {', '.join(KNOWN)}")
    if args.seeds < 1 or not policies:
        raise BadInput("--seeds and --policies: at least one of each")
    slo = parse_slo(args.slo)
    settings = read_fleet(args.file)
    setup = setup_of(
        settings, model_of(settings, args.model), build(ReplicaOptions, given_flags(args, "replica"))
    )
    changes = {"replicas": args.replicas, "routers": args.routers, "roll_at_s": args.roll_at_s}
    setup = replace(
        setup,
        seed=traffic_options.seed,
        **{name: value for name, value in changes.items() if value is not None},
    )

    with shown(sys.stderr) as on_progress:
        compared = compare(
            lambda seed: clipped(
                build_traffic(replace(traffic_options, seed=seed)), setup.limits.max_context
            ),
            setup,
            slo,
            policies,
            args.seeds,
            on_progress,
        )
    if args.json:
        print(
            json.dumps({"replicas": setup.replicas, "slo": str(slo), "policies": compared.figures}, indent=1)
        )
    else:
        print("\n".join(report(compared, setup, slo)))
    return 0


@contextlib.contextmanager
def shown(stream: TextIO) -> Iterator[OnProgress]:
    """A bar on a terminal, otherwise a line every few seconds."""
    if not stream.isatty():
        yield _lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, seconds: bar.update(
            task,
            completed=done,
            total=total,
            description=f"{done:,} of {total:,} requests, at {seconds:,.0f} s",
        )


def _lines(stream: TextIO) -> OnProgress:
    next_at = time.monotonic() + LINE_EVERY_S

    def show(done: int, total: int, seconds: float) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + LINE_EVERY_S
            print(f"{done:,} of {total:,} requests, at {seconds:,.0f} s", file=stream, flush=True)

    return show
