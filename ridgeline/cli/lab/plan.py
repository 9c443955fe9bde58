"""`ridgeline plan`: plans how to serve a model within limits and a budget; with verify and fit."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ridgeline.cli.parsing import MODEL_HELP, Verbs, add_subverb, add_verb, path_argument
from ridgeline.lab.plan.options import PlanOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import add_flags, build, given_flags

if TYPE_CHECKING:
    from ridgeline.fleet.placement import PoolsFile

DEFAULT_URL = "http://127.0.0.1:8000"

DESCRIPTION = """\
Plan how to serve a model: which hardware and how much of it, what each replica will measure, what it costs,
and why, step by step. MODEL may also be a config.json alone; no weights are read. The traffic is simulated on
the real scheduler with step times that were fitted on this machine (`plan fit`), or else computed from first
principles; every figure has an interval. If no plan fits, the answer names the binding constraint and the
nearest plan.

Writes plan.toml (for `ridgeline serve --config`), prediction.json (for `plan verify`) and plan.html."""

EXAMPLES = """\
  ridgeline plan smollm2-135m --hardware cpu --input 256 --output 64 --rate 1
  ridgeline plan hf:Qwen/Qwen3-8B --hardware h200 --rate 50 --input 2048 --output 256 \\
       --slo ttft_p90=400ms,tpot_p90=50ms --budget '$20000/month'
  ridgeline plan Llama-3.1-70B --gpu h100,h200,b200 --rate 10 --input 2000 --output 200
  ridgeline plan ./config.json --hardware h100 --gpus-max 16 --traffic azure:trace.csv --busy-hours 10
  ridgeline plan Qwen3-32B --hardware h100 --rate 20 --input 2000 --output 200 --pools pools.toml
  ridgeline plan verify plan/prediction.json bench-results/20261115-run
  ridgeline plan fit http://127.0.0.1:8000
"""

VERIFY = """\
Score a prediction against runs of `ridgeline bench`: predicted, measured, the error, and whether it was
inside its interval. The error is stored, and later plans of the same model on the same hardware are corrected
by it, in value and in width. A run that is invalid or sent other traffic is refused; --force scores it, but
does not store its error. plan prints the bench command that sends the right traffic."""

VERIFY_EXAMPLES = """\
  ridgeline plan verify plan/prediction.json bench-results/20261115-run
  ridgeline plan verify plan/prediction.json bench-results/a bench-results/b --json
"""

FIT = """\
Measure the step times of a running server under traffic of many kinds, fit a model of step times, and store
it: plans for this model on this hardware are then simulated with it. Takes about two minutes, best on an idle
machine. A fit whose error on held-out traffic exceeds 30 %, or the error of the stored fit, is not stored
(exit code 1). The server must be a ridgeline of this version."""

FIT_EXAMPLES = """\
  ridgeline plan fit
  ridgeline plan fit http://127.0.0.1:8000 --config plan/plan.toml --seconds 180
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "plan", "plan hardware and settings for a model", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "model", metavar="MODEL", help=f"{MODEL_HELP}, a well-known one like Qwen3-8B, or a config.json"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=path_argument, help="write to this folder (default: plan)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the prediction as JSON instead of the plan"
    )
    add_flags(parser, "plan", PlanOptions, title="the plan")
    parser.add_argument(
        "--gpu",
        dest="plan.hardware",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="the same as --hardware",
    )
    add_flags(parser, "traffic", TrafficOptions, title="the traffic")
    parser.set_defaults(run=run)
    _add_verify(parser)
    _add_fit(parser)


def run(args: argparse.Namespace) -> int:
    from ridgeline.lab.plan.decision_list import decision_list
    from ridgeline.lab.plan.make_plan import make_plan
    from ridgeline.lab.plan.reports.placed import place_plan, placed_facts, placed_lines
    from ridgeline.lab.plan.reports.result import commands, write_plan
    from ridgeline.lab.plan.reports.text import plan_lines
    from ridgeline.lab.plan.request import chip_names, read_request

    options = build(PlanOptions, given_flags(args, "plan"))
    chips = chip_names(options)
    if len(chips) > 1:
        return _run_chips(args, options, chips)
    traffic = build(TrafficOptions, given_flags(args, "traffic"))
    pools = _read_pools(options)
    with working(sys.stderr) as report:
        plan = make_plan(read_request(args.model, options, traffic), report)
    placed = None if pools is None else place_plan(plan, pools)
    decisions = decision_list(plan)
    folder = args.out or Path("plan")
    written = write_plan(plan, decisions, folder)
    is_short = placed is not None and placed.unplaced > 0
    if args.json:
        text = written.prediction.read_text(encoding="utf-8")
        if placed is not None:
            text = json.dumps(json.loads(text) | {"placement": placed_facts(placed)}, indent=2) + "\n"
        print(text, end="")
        return 1 if is_short else 0
    print("\n".join(plan_lines(plan, decisions)))
    print()
    if placed is not None:
        print("\n".join(placed_lines(placed)))
        print()
    for what, command in commands(plan, folder):
        print(f"{what + ':':<16} {command}")
    print(f"{'read it:':<16} {written.page}")
    return 1 if is_short else 0


def _read_pools(options: PlanOptions) -> PoolsFile | None:
    """Before the plan is made: an error in the file need not wait for it."""
    if options.pools is None:
        return None
    from ridgeline.fleet.placement import read_pools

    return read_pools(options.pools, needs_models=False)


def _run_chips(args: argparse.Namespace, options: PlanOptions, chips: Sequence[str]) -> int:
    """A plan for each chip in its own folder, and a comparison."""
    from ridgeline.lab.plan.compare_chips import comparison_facts, comparison_lines, plan_chips
    from ridgeline.lab.plan.decision_list import decision_list
    from ridgeline.lab.plan.reports.placed import place_plan, placed_facts, placed_lines
    from ridgeline.lab.plan.reports.result import write_plan
    from ridgeline.lab.plan.request import read_request

    traffic = build(TrafficOptions, given_flags(args, "traffic"))
    pools = _read_pools(options)
    with working(sys.stderr) as report:
        answers = plan_chips([read_request(args.model, options, traffic, name) for name in chips], report)
    folder = args.out or Path("plan")
    written = {a.chip: write_plan(a.plan, decision_list(a.plan), folder / a.chip) for a in answers if a.plan}
    placed = {a.chip: place_plan(a.plan, pools) for a in answers if a.plan} if pools is not None else {}
    if args.json:
        facts = comparison_facts(answers)
        for one in facts:
            if one["chip"] in placed:
                one["placement"] = placed_facts(placed[one["chip"]])
        print(json.dumps(facts, indent=2))
        return 0
    print("\n".join(comparison_lines(answers)))
    print()
    for name, found in placed.items():
        print("\n".join([f"{name}:", *placed_lines(found), ""]))
    for name, files in written.items():
        print(f"{name + ':':<16} {files.page}")
    return 0


@contextlib.contextmanager
def working(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Shows progress: on a terminal's last line, elsewhere one line each."""
    if not stream.isatty():
        yield lambda text: print(text, file=stream, flush=True)
        return
    from rich.console import Console

    with Console(file=stream).status("reading") as status:
        yield lambda text: status.update(text)


# ── plan verify ──────────────────────────────────────────────────────────────────────────────────────────


def _add_verify(plan: argparse.ArgumentParser) -> None:
    parser = add_subverb(plan, "verify", VERIFY, VERIFY_EXAMPLES)
    parser.add_argument(
        "prediction", metavar="PREDICTION", type=path_argument, help="prediction.json of a plan"
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=path_argument, help="folder of a `ridgeline bench` run"
    )
    parser.add_argument(
        "--force", action="store_true", help="score runs that do not match the prediction, with a caveat"
    )
    parser.add_argument("--no-store", action="store_true", help="do not store the error")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    from ridgeline.lab.plan.reports.text import verdict_lines
    from ridgeline.lab.plan.verify import read_run, store, verdict_facts, verify
    from ridgeline.lab.prediction import read_prediction

    prediction = read_prediction(args.prediction)
    verdicts = [verify(prediction, read_run(folder), force=args.force) for folder in args.runs]
    kept = None
    for verdict in verdicts:
        if not args.no_store:
            kept = store(prediction, verdict) or kept
    if args.json:
        print(json.dumps([verdict_facts(verdict) for verdict in verdicts], indent=2))
        return 0
    print(f"{prediction.model} on {prediction.hardware}, {prediction.method}, made {prediction.made_at}")
    for verdict in verdicts:
        print()
        print("\n".join(verdict_lines(verdict)))
    if kept is not None:
        print(f"\nkept in {kept}: later plans are corrected by it")
    return 0


# ── plan fit ─────────────────────────────────────────────────────────────────────────────────────────────


def _add_fit(plan: argparse.ArgumentParser) -> None:
    parser = add_subverb(plan, "fit", FIT, FIT_EXAMPLES)
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--model", metavar="NAME", default="", help="the server's model to measure (default: its first)"
    )
    parser.add_argument("--hardware", metavar="NAME", default="cpu", help="what it runs on (default: cpu)")
    parser.add_argument("--config", metavar="FILE", type=path_argument, help="the file it was started with")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help="of traffic (default: 90)")
    parser.add_argument("--api-key", metavar="KEY", default="", help="key for the server")
    parser.add_argument(
        "--force", action="store_true", help="store the fit even if it is bad, or worse than the stored one"
    )
    parser.set_defaults(run=run_fit)


def run_fit(args: argparse.Namespace) -> int:
    from ridgeline.lab.bench.run import in_loop
    from ridgeline.lab.hardware.find_chip import find_chip
    from ridgeline.lab.perfmodel.stored import settings_of
    from ridgeline.lab.plan.choose_step_times import OVERLAPPED_STEPS
    from ridgeline.lab.plan.request import positive
    from ridgeline.lab.plan.settings import read_config
    from ridgeline.lab.simulate.measure import fit_server

    hardware = find_chip(args.hardware).name
    settings = settings_of(read_config(args.config)) if args.config else {}
    with working(sys.stderr) as report:
        fit = in_loop(
            fit_server(
                args.url,
                hardware=hardware,
                settings=settings,
                seconds=positive("--seconds", args.seconds) or 90.0,
                model=args.model,
                api_key=args.api_key,
                lookahead=0 if hardware == "cpu" else OVERLAPPED_STEPS,
                force=args.force,
                on_phase=lambda name: report(f"measuring: {name}"),
            )
        )
    times = fit.measured.times
    print(f"{times.decode.records:,} decode steps and {times.mixed.records:,} with prompts were fitted")
    for error in times.errors:
        print(
            f"  {error.trace}, held out: a step is off by {error.median:.1%} (P90 {error.p90:.1%}), "
            f"all together by {error.total:+.1%}"
        )
    for note in fit.measured.notes:
        print(f"note: {note}", file=sys.stderr)
    if fit.path is None:
        print(
            f"ridgeline: the fit was not stored: {fit.refused}. Plans stay as before. Fit again on an idle "
            "machine, or store this one with --force",
            file=sys.stderr,
        )
        return 1
    print(f"kept in {fit.path}")
    return 0
