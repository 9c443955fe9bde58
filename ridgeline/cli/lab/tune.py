"""`ridgeline tune`: better settings for a model and a load, one measured change at a time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ridgeline.cli.parsing import (
    MODEL_HELP,
    Verbs,
    add_subverb,
    add_verb,
    path_argument,
)
from ridgeline.lab.errors import BadInput
from ridgeline.options import add_flags, build, given_flags

if TYPE_CHECKING:  # `ridgeline --help` imports nothing heavy
    from ridgeline.lab.tune.climb import Report
    from ridgeline.lab.tune.ledger import Ledger
    from ridgeline.lab.tune.run import TuneRequest

CONCURRENCY, WARMUP, RUN_S, READY_S, ROUNDS = 8, 8, 60.0, 180.0, 4
DEFAULT_LEDGER, PAGE_FILE = "bench-results/tune", "ledger.html"

DESCRIPTION = """\
Find better engine settings for a model under a load. Each trial changes one setting of its parent and runs
both, A/B/A/B, on servers started for it, one at a time; a change is kept if its effect exceeds the noise,
which is measured first, A against A. The ledger is written as each run ends: after a crash or Ctrl-C, the
same command resumes with the lost run. The winner is a file for `ridgeline serve --config`.

`tune trial` makes one trial by hand, `tune show` prints a ledger. Both take --ledger."""

EXAMPLES = """\
  ridgeline tune smollm2-135m --concurrency 16 --input 512 --output 64 --requests 64
  ridgeline tune smollm2-135m --try step_tokens=64,128,256,512 --try max_running=8,16,32 --budget-s 3600
  ridgeline tune smollm2-135m --rate 2 --objective ttft_sched_ms.p90 --ledger tuning/latency
  ridgeline tune --ledger tuning/latency
  ridgeline tune trial step_tokens=1024 --parent 3 --ledger tuning/latency
  ridgeline tune show --ledger tuning/latency --usd-per-hour 0.9
  ridgeline serve --config tuning/latency/winner.toml
"""


def add_parser(verbs: Verbs) -> None:
    from ridgeline.lab.traffic.options import TrafficOptions

    parser = add_verb(verbs, "tune", "find better settings, one change at a time", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; without it: resume the ledger"
    )
    _add_ledger(parser)
    _add_costs(parser)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--try",
        dest="space",
        action="append",
        metavar="KEY=V,V…",
        help="try these values of a setting, in order; may be repeated (default: settings without risk)",
    )
    search.add_argument("--keys", metavar="KEY,KEY", help="try these settings at the usual values")
    search.add_argument(
        "--set", dest="base", action="append", metavar="KEY=V", help="start from this setting"
    )
    search.add_argument(
        "--objective",
        metavar="METRIC",
        help="improve this metric (default: output_tokens_per_s, with --rate e2e_sched_ms.p90)",
    )
    search.add_argument(
        "--slo", metavar="LIMITS", help="reject changes that break these limits: ttft_p90=400ms,tpot_p90=50ms"
    )
    search.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"compare A and B this many times in a trial, at least 3 (default: {ROUNDS})",
    )
    search.add_argument(
        "--trial-s", type=float, metavar="S", help="start no round of a trial after this many seconds"
    )
    search.add_argument("--budget-s", type=float, metavar="S", help="start no round after this many seconds")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"keep this many requests in flight (default: {CONCURRENCY}; not with --rate)",
    )
    load.add_argument(
        "--warmup", type=int, metavar="N", help=f"send this many requests before each run (default: {WARMUP})"
    )
    load.add_argument(
        "--run-s", type=float, metavar="S", help=f"end a run after this many seconds (default: {RUN_S:.0f})"
    )
    load.add_argument(
        "--ready-s",
        type=float,
        metavar="S",
        help=f"fail a server that is not ready after this many seconds (default: {READY_S:.0f})",
    )
    load.add_argument(
        "--keep-invalid", action="store_true", help="also count runs in which the client was the bottleneck"
    )
    add_flags(parser, "traffic", TrafficOptions, title="traffic")
    parser.set_defaults(run=run)
    _add_trial(parser)
    _add_show(parser)


def _add_trial(verb: argparse.ArgumentParser) -> None:
    text = "Measure one change of one setting against the settings of an earlier trial."
    parser = add_subverb(verb, "trial", text, "  ridgeline tune trial step_tokens=512 --parent 2\n")
    parser.add_argument("change", nargs="+", metavar="KEY=VALUE", help="the one setting to change")
    parser.add_argument(
        "--parent", type=int, default=0, metavar="N", help="trial to start from (default: 0, the base)"
    )
    _add_ledger(parser)
    _add_costs(parser)
    parser.set_defaults(run=run_trial)


def _add_show(verb: argparse.ArgumentParser) -> None:
    parser = add_subverb(
        verb, "show", "Print a ledger.", "  ridgeline tune show --ledger bench-results/tune\n"
    )
    _add_ledger(parser)
    _add_costs(parser)
    parser.set_defaults(run=run_show)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ledger",
        type=path_argument,
        default=Path(DEFAULT_LEDGER),
        metavar="DIR",
        help=f"folder of the ledger (default: {DEFAULT_LEDGER})",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--latency", metavar="METRIC", help="latency of the front (default: P90 of TTFT)")
    parser.add_argument("--usd-per-hour", type=float, metavar="USD", help="cost of an hour of this machine")
    parser.add_argument(
        "--hardware", metavar="NAME", help="take the cost from the hardware table: h200, l4, …"
    )


def run(args: argparse.Namespace) -> int:
    from ridgeline.cli.progress import fetch
    from ridgeline.lab.tune.climb import Search
    from ridgeline.lab.tune.run import climb, opened
    from ridgeline.lab.tune.space import default_space, parse_space
    from ridgeline.machine import compute_threads

    if args.model == "show":  # `ridgeline tune --ledger DIR show`
        return run_show(args)
    space: dict[str, Sequence[Any]] = {**parse_space(args.space or ())}
    is_named = bool(args.keys or space)
    if args.keys or not space:
        space = {**default_space(compute_threads(), args.keys or ""), **space}
    usd_per_hour = _usd_per_hour(args)
    with opened(args.ledger, _request(args, space)) as ledger:
        assert ledger.header is not None
        if not is_named and ledger.header.space:  # as it was begun
            space = {**ledger.header.space}
        fetch(ledger.header.model, sys.stderr)
        try:
            ended = climb(ledger, Search(space, args.trial_s, args.budget_s), _report(), _terminal())
        except KeyboardInterrupt:
            print("interrupted; the same command resumes it", file=sys.stderr)
            _show(ledger, args, usd_per_hour)
            raise
        print(f"ended: {ended}", file=sys.stderr)
        _show(ledger, args, usd_per_hour)
    return 0


def run_trial(args: argparse.Namespace) -> int:
    from ridgeline.lab.tune.climb import only_change
    from ridgeline.lab.tune.run import opened, try_one
    from ridgeline.lab.tune.space import parse_settings

    change = parse_settings(args.change, "trial")
    only_change(change)
    usd_per_hour = _usd_per_hour(args)
    with opened(args.ledger, None) as ledger:
        verdict = try_one(ledger, change, args.parent, _report(), _terminal())
        _show(ledger, args, usd_per_hour)
    print(f"{verdict.decision}: {verdict.reason}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from ridgeline.lab.tune.ledger import Ledger

    with Ledger(args.ledger, write=False) as ledger:
        _show(ledger, args, _usd_per_hour(args))
    return 0


def _request(args: argparse.Namespace, space: Mapping[str, Sequence[Any]]) -> TuneRequest | None:
    """The request on the command line; None: resume the ledger."""
    from ridgeline.lab.traffic.options import TrafficOptions
    from ridgeline.lab.tune.measure import Workload
    from ridgeline.lab.tune.run import TuneRequest
    from ridgeline.lab.tune.space import parse_settings

    traffic = given_flags(args, "traffic")
    named: dict[str, Any] = {
        "concurrency": args.concurrency,
        "warmup": args.warmup,
        "run_s": args.run_s,
        "ready_s": args.ready_s,
        "objective": args.objective,
        "rounds": args.rounds,
        "slo": args.slo,
        "base": args.base,
    }
    if args.model is None:
        given = [name for name, value in named.items() if value is not None] + list(traffic)
        if given:
            raise BadInput(f"--{given[0].replace('_', '-')} is for a new ledger: give its MODEL as well")
        return None
    options = build(TrafficOptions, traffic)
    is_open = options.rate is not None or (options.traffic is not None and options.arrivals != "closed")
    if is_open and args.concurrency is not None:
        raise BadInput("--concurrency cannot be combined with --rate: an open loop has no fixed concurrency")
    workload = Workload(
        traffic=options,
        concurrency=None if is_open else _given(args.concurrency, CONCURRENCY),
        warmup=_given(args.warmup, WARMUP),
        run_s=_given(args.run_s, RUN_S),
        ready_s=_given(args.ready_s, READY_S),
        keep_invalid=args.keep_invalid,
    )
    objective = args.objective or ("e2e_sched_ms.p90" if is_open else "output_tokens_per_s")
    return TuneRequest(
        model=args.model,
        base=parse_settings(args.base or ()),
        workload=workload,
        objective=objective,
        rounds=_given(args.rounds, ROUNDS),
        slo=args.slo or "",
        space=space,
    )


def _given(value: Any, default: Any) -> Any:
    """0 counts as given; it is refused elsewhere."""
    return default if value is None else value


def _usd_per_hour(args: argparse.Namespace) -> float | None:
    if args.usd_per_hour is not None and args.hardware:
        raise BadInput("give --usd-per-hour or --hardware, not both")
    if args.usd_per_hour is not None and not args.usd_per_hour > 0:
        raise BadInput(f"--usd-per-hour must be above 0, got {args.usd_per_hour:g}")
    if not args.hardware:
        price: float | None = args.usd_per_hour
        return price
    from ridgeline.lab.hardware.find_chip import find_chip

    found = find_chip(args.hardware)
    if found.usd_per_hour is None:
        raise BadInput(f"--hardware {args.hardware}: the table has no price for it; give --usd-per-hour")
    return found.usd_per_hour


def _show(ledger: Ledger, args: argparse.Namespace, usd_per_hour: float | None) -> None:
    from ridgeline.lab.tune.html import ledger_page
    from ridgeline.lab.tune.report import ledger_lines

    is_open = ledger.header is not None and ledger.header.is_open
    latency = args.latency or ("ttft_sched_ms.p90" if is_open else "ttft_ms.p90")
    print("\n".join(ledger_lines(ledger, latency, usd_per_hour)))
    page = ledger.folder / PAGE_FILE
    page.write_text(ledger_page(ledger, latency, usd_per_hour), encoding="utf-8")
    print(f"wrote {page}")


def _terminal() -> TextIO | None:
    """Where the progress of each run is shown."""
    return sys.stderr if sys.stderr.isatty() else None


def _report() -> Report:
    started = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    return report
