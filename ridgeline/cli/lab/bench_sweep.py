"""`ridgeline bench sweep`: one run after the other, up to the knee."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.cli.flags.aliases import add_aliases
from ridgeline.cli.parsing import add_subverb, path_argument
from ridgeline.cli.source import API_KEY_VARIABLE
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.bench.sweeps.options import SweepOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import add_flags, build, given_flags

RESULTS = Path("bench-results")
EXIT_INTERRUPTED = 130
# Options that a sweep sets for each load.
_BENCH_SKIP = ("concurrency", "duration_s", "run_s", "name")
_TRAFFIC_SKIP = ("rate", "end_rate", "speed")

DESCRIPTION = """\
Measure a server at one load after the other, each run in its own folder: the load is doubled until the server
is overloaded, then the gap is halved. The knee is the largest load that keeps --slo; without --slo, the load
at which requests queue up or throughput stops growing. With the same --out, it resumes."""

EXAMPLES = """\
  ridgeline bench sweep http://127.0.0.1:8000 --over rate --input 1000 --output 200 --slo ttft=400,tpot=50
  ridgeline bench sweep http://127.0.0.1:8000 --over concurrency --values 1,2,4,8,16,32
  ridgeline bench sweep http://127.0.0.1:8000 --traffic azure:conv.csv --point-s 60 --out runs/azure
"""


def add_sweep(bench: argparse.ArgumentParser) -> None:
    parser = add_subverb(bench, "sweep", DESCRIPTION, EXAMPLES)
    parser.add_argument("url", metavar="URL", help="the server's address, as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=path_argument,
        help=f"save the sweep in this folder (default: {RESULTS}/DATE-sweep)",
    )
    add_flags(parser, "sweep", SweepOptions, title="the sweep")
    add_flags(parser, "bench", BenchOptions, title="each run", skip=_BENCH_SKIP)
    add_flags(parser, "traffic", TrafficOptions, title="the traffic", skip=_TRAFFIC_SKIP)
    add_aliases(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = build(SweepOptions, given_flags(args, "sweep"))
    bench = build(BenchOptions, given_flags(args, "bench"))
    traffic = build(TrafficOptions, given_flags(args, "traffic"))
    from ridgeline.lab.bench.client.target import reach
    from ridgeline.lab.bench.progress import shown
    from ridgeline.lab.bench.reports.report_file import write_report
    from ridgeline.lab.bench.run import in_loop
    from ridgeline.lab.bench.selftest import passed_before
    from ridgeline.lab.bench.sweeps.point import planned_sweep, run_sweep, selftest_load
    from ridgeline.lab.bench.sweeps.sweep import Point, stopped
    from ridgeline.lab.bench.sweeps.text import closing_lines, head, point_line

    planned_sweep(args.url, options, bench, traffic)
    in_loop(reach(args.url, bench.connect_s))
    facts: dict[str, Any] = {"skipped": "--no-selftest"}
    if bench.selftest:
        print("self-test: a server of known latencies …", file=sys.stderr)
        facts = passed_before(*selftest_load(options)).facts()
    folder = args.out or RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}-sweep"

    def on_point(point: Point) -> None:
        print(point_line(point, options.over), flush=True)
        write_report(folder / point.folder)

    print(head(options.over))
    with shown(sys.stderr) as on_progress:
        measuring = run_sweep(
            args.url,
            options,
            bench,
            traffic,
            folder,
            api_key=args.api_key or os.environ.get(API_KEY_VARIABLE, ""),
            selftest=facts,
            on_point=on_point,
            on_progress=on_progress,
        )
        try:
            result = in_loop(measuring)
        except KeyboardInterrupt:  # between two points
            result = stopped(folder)
    print("\n".join(closing_lines(result)))
    print(f"kept in {folder}; {write_report(folder)}", file=sys.stderr)
    return EXIT_INTERRUPTED if result.is_interrupted else 0
