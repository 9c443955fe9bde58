"""`ridgeline simulate`: what a fleet or one engine does with a trace, by their own classes and a simulated
clock."""

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
    from ridgeline.fleet.routing.policy import PolicyName
    from ridgeline.lab.simulate.fleet.loop import OnProgress

DEFAULT_SLO = "ttft_p90=1s,tpot_p90=50ms"
LINE_EVERY_S = 5.0
POLICIES = "round-robin,least-loaded,prefix,default"
SEEDS = 3
OF_A_FLEET = ("model", "replicas", "routers", "policies", "seeds", "slo", "roll_at_s")

DESCRIPTION = """\
Simulate a fleet, or one engine, under traffic.

simulate fleet FILE: the fleet's own router, queue, autoscaler and rollout classes with a
simulated clock; each replica is the engine's own scheduler and KV pool with predicted step times. Prints SLO
attainment, cost and a comparison of routing policies, with intervals over seeds. Exact up to 1,000 replicas;
a larger fleet is projected, and the output says so.

simulate engine MODEL: the engine's scheduler and KV pool with predicted step times, with arrivals (--rate or
a trace) or in a closed loop (--concurrency). Prints latencies and throughput; with --draft-rates without and
with speculation, which then decides by the engine's own policy when to guess and how much."""

EXAMPLES = """\
  ridgeline simulate fleet fleet.toml --trace mooncake:conversation_trace.jsonl --window-s 600
  ridgeline simulate fleet fleet.toml --trace azure:AzureLLMInferenceTrace_conv.csv --speed 4 --seeds 5
  ridgeline simulate fleet fleet.toml --rate 20 --requests 2000 --policies round-robin,default
  ridgeline simulate fleet fleet.toml --rate 20 --requests 2000 --roll-at-s 30 --json
  ridgeline simulate engine Qwen3-8B --concurrency 8 --input 512 --output 256
  ridgeline simulate engine Qwen3-8B --rate 10 --draft-rates 0.73,0.52,0.35 --draft-ms 0.4
"""


def add_parser(verbs: Verbs) -> None:
    from ridgeline.lab.simulate.replica_options import ReplicaOptions

    parser = add_verb(verbs, "simulate", "simulate a fleet or an engine", DESCRIPTION, EXAMPLES)
    parser.add_argument("what", choices=["fleet", "engine"], help="what to simulate")
    parser.add_argument(
        "source", metavar="FILE|MODEL", help="a fleet's fleet.toml; an engine's model: name, folder or file"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="engine: keep this many requests under way, without --rate",
    )
    parser.add_argument("--model", metavar="NAME", help="model of a fleet that has several")
    parser.add_argument("--replicas", type=int, metavar="N", help="replicas instead of the file's number")
    parser.add_argument("--routers", type=int, metavar="N", help="routers instead of the file's number")
    parser.add_argument("--policies", metavar="NAME,NAME", help=f"policies to compare (default: {POLICIES})")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each policy (default: {SEEDS})")
    parser.add_argument("--slo", metavar="LIMITS", help=f"latency limits (default: {DEFAULT_SLO})")
    parser.add_argument(
        "--roll-at-s", type=float, metavar="X", help="roll out a new version at this second of the traffic"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--trace", metavar="KIND:FILE", help="trace to replay: the same as --traffic")
    add_flags(parser, "replica", ReplicaOptions, title="the engine, or each replica", skip=("max_context",))
    add_flags(parser, "traffic", TrafficOptions, title="the traffic")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return _run_engine(args) if args.what == "engine" else _run_fleet(args)


def _traffic_options(args: argparse.Namespace) -> TrafficOptions:
    given = given_flags(args, "traffic")
    if args.trace is not None:
        if "traffic" in given:
            raise BadInput("--trace and --traffic are one setting; give one of them")
        given["traffic"] = args.trace
    return build(TrafficOptions, given)


def _run_engine(args: argparse.Namespace) -> int:
    from ridgeline.lab.simulate.engine_setup import engine_of
    from ridgeline.lab.simulate.one_engine import compared, report
    from ridgeline.lab.simulate.replica_options import ReplicaOptions
    from ridgeline.lab.traffic.operations import clipped
    from ridgeline.lab.traffic.source import build_traffic

    for name in OF_A_FLEET:
        if getattr(args, name) is not None:
            raise BadInput(f"--{name.replace('_', '-')} is for `simulate fleet`")
    options = _traffic_options(args)
    is_open = options.traffic is not None or options.rate is not None
    if is_open == (args.concurrency is not None):
        raise BadInput("give either arrivals (--rate or a --trace) or a closed loop (--concurrency)")
    setup = engine_of(args.source, build(ReplicaOptions, given_flags(args, "replica")))
    traffic = clipped(build_traffic(options), setup.limits.max_context)
    found = compared(traffic, setup, args.concurrency, options.seed)
    if args.json:
        print(
            json.dumps({"model": args.source, "figures": found.figures, "caveats": found.caveats}, indent=1)
        )
    else:
        print("\n".join(report(found)))
    return 0


def _run_fleet(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ridgeline.fleet.config import read_fleet
    from ridgeline.lab.simulate.fleet.compare import compare
    from ridgeline.lab.simulate.fleet.from_file import model_of, setup_of
    from ridgeline.lab.simulate.fleet.report import report
    from ridgeline.lab.simulate.replica_options import ReplicaOptions
    from ridgeline.lab.slo import parse_slo
    from ridgeline.lab.traffic.operations import clipped
    from ridgeline.lab.traffic.source import build_traffic

    if args.concurrency is not None:
        raise BadInput("--concurrency is for `simulate engine`: a fleet is simulated under arrivals")
    traffic_options = _traffic_options(args)
    if traffic_options.traffic is None and traffic_options.rate is None:
        raise BadInput("give a --trace, or a --rate: a fleet is simulated under traffic with arrival times")
    seeds = SEEDS if args.seeds is None else args.seeds
    policies = _policies(args.policies or POLICIES)
    if seeds < 1 or not policies:
        raise BadInput("--seeds and --policies: at least one of each")
    slo = parse_slo(args.slo or DEFAULT_SLO)
    settings = read_fleet(path_argument(args.source))
    setup = setup_of(
        settings, model_of(settings, args.model or ""), build(ReplicaOptions, given_flags(args, "replica"))
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
            seeds,
            on_progress,
        )
    if args.json:
        print(
            json.dumps({"replicas": setup.replicas, "slo": str(slo), "policies": compared.figures}, indent=1)
        )
    else:
        print("\n".join(report(compared, setup, slo)))
    return 0


def _policies(text: str) -> list[PolicyName]:
    from ridgeline.fleet.routing.policy import POLICIES as KNOWN

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KNOWN:
            raise BadInput(f"unknown policy {name!r}; known: {', '.join(KNOWN)}")
    return [known for name in names for known in KNOWN if known == name]


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
