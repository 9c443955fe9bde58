"""`ridgeline plan`: plans how to serve a model within limits and a budget; with verify and fit."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ridgeline.cli.parsing import MODEL_HELP, Verbs, add_subverb, add_verb, path_argument
from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.options import GPUS_MAX, PlanOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import add_flags, build, given_flags

if TYPE_CHECKING:  # `ridgeline --help` imports nothing heavy
    from ridgeline.lab.hardware import Chip
    from ridgeline.lab.plan.demand import Demand
    from ridgeline.lab.plan.plan import PlanRequest
    from ridgeline.lab.plan.prices import Offers
    from ridgeline.models.spec.model_spec import ModelSpec

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
    from ridgeline.lab.plan.make import make_plan
    from ridgeline.lab.plan.reports.result import commands, write_plan
    from ridgeline.lab.plan.reports.text import plan_lines
    from ridgeline.lab.plan.steps import decisions

    chips = _chip_names(args)
    if len(chips) > 1:
        return _run_chips(args, chips)
    with working(sys.stderr) as report:
        plan = make_plan(request_of(args), report)
    steps = decisions(plan)
    folder = args.out or Path("plan")
    written = write_plan(plan, steps, folder)
    if args.json:
        print(written.prediction.read_text(encoding="utf-8"), end="")
        return 0
    print("\n".join(plan_lines(plan, steps)))
    print()
    for what, command in commands(plan, folder):
        print(f"{what + ':':<16} {command}")
    print(f"{'read it:':<16} {written.page}")
    return 0


def _chip_names(args: argparse.Namespace) -> list[str]:
    options = build(PlanOptions, given_flags(args, "plan"))
    names = [name.strip() for name in options.hardware.split(",") if name.strip()]
    if len(names) > 1 and options.gpu_price is not None:
        raise BadInput("--gpu-price applies to one chip; with several, prices come from the hardware table")
    return names


def _run_chips(args: argparse.Namespace, chips: Sequence[str]) -> int:
    """A plan for each chip in its own folder, and a comparison."""
    from ridgeline.lab.plan.chips import comparison_facts, comparison_lines, plan_chips
    from ridgeline.lab.plan.reports.result import write_plan
    from ridgeline.lab.plan.steps import decisions

    with working(sys.stderr) as report:
        answers = plan_chips([request_of(args, name) for name in chips], report)
    folder = args.out or Path("plan")
    written = {a.chip: write_plan(a.plan, decisions(a.plan), folder / a.chip) for a in answers if a.plan}
    if args.json:
        print(json.dumps(comparison_facts(answers), indent=2))
        return 0
    print("\n".join(comparison_lines(answers)))
    print()
    for name, files in written.items():
        print(f"{name + ':':<16} {files.page}")
    return 0


def request_of(args: argparse.Namespace, hardware_name: str | None = None) -> PlanRequest:
    """The parsed request. hardware_name: one of several chips."""
    from ridgeline.lab.hardware import chip
    from ridgeline.lab.plan.demand import parse_budget, read_demand, read_slo
    from ridgeline.lab.plan.plan import PlanRequest
    from ridgeline.models.spec.find_spec import find_spec, published_for
    from ridgeline.models.spec.precision import format_name

    options = build(PlanOptions, given_flags(args, "plan"))
    slo = read_slo(options.slo)
    budget = None if options.budget is None else parse_budget(options.budget)
    demand = read_demand(build(TrafficOptions, given_flags(args, "traffic")))
    shape = find_spec(args.model)
    known = published_for(args.model)
    hardware = chip(
        hardware_name or options.hardware
    )  # after all checks: a processor may have to be measured
    try:
        kv_precision = format_name(options.kv_precision)
        precision = None if options.precision is None else format_name(options.precision)
    except ValueError as error:
        raise BadInput(f"--precision, --kv-precision: {error}") from error
    offers, why_none = offers_of(options, shape, demand)
    return PlanRequest(
        model=f"hf:{known.hub_ids[0]}" if known else args.model,
        shape=shape,
        chip=hardware,
        demand=demand,
        slo=slo,
        gpus_max=gpus_max(options.gpus_max, hardware),
        engine=options.engine,
        precision=precision,
        kv_precision=kv_precision,
        budget=budget,
        usd_per_gpu_hour=positive("--gpu-price", options.gpu_price) or hardware.usd_per_hour,
        offers=offers,
        no_offers=why_none,
        busy_hours=options.busy_hours,
        users=positive("--users", options.users),
        settings=engine_values(options.set),
    )


def offers_of(options: PlanOptions, shape: ModelSpec, demand: Demand) -> tuple[Offers | None, str]:
    """Prices as given, else as listed; or the reason why there are none."""
    from ridgeline.lab.errors import LabError
    from ridgeline.lab.plan.prices import given_offer, hosted_offers

    given = [
        positive("--" + name.replace("_", "-"), getattr(options, name))
        for name in ("price_in", "price_out", "price_cached")
    ]
    if given[0] is not None and given[1] is not None:
        return given_offer(given[0], given[1], given[2]), ""
    if any(price is not None for price in given):
        raise BadInput("--price-in and --price-out go together, with --price-cached where there is one")
    ratio = demand.mean_input / demand.mean_output
    try:
        return hosted_offers(shape.name, shape.parameters, wanted=options.hosted, in_to_out=ratio), ""
    except BadInput:
        raise
    except LabError as error:  # the table is not installed: a plan does not need it
        return None, str(error)


def gpus_max(asked: int | None, hardware: Chip) -> int:
    if asked is not None and asked < 1:
        raise BadInput(f"--gpus-max must be at least 1, got {asked}")
    if hardware.name == "cpu":
        return 1
    return asked or GPUS_MAX


def positive(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise BadInput(f"{flag} must be above 0, got {value:g}")
    return value


def engine_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`--set KEY=V`, each value as in a config file."""
    import tomllib

    from ridgeline.engine.config import EngineConfig
    from ridgeline.options import check_values

    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise BadInput(f"--set {pair}: write KEY=VALUE")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text  # a word without quotes
    return check_values(EngineConfig, values, where="--set ")


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
    from ridgeline.lab.hardware import chip
    from ridgeline.lab.perfmodel.stored import settings_of
    from ridgeline.lab.plan.settings import read_config
    from ridgeline.lab.plan.times import OVERLAPPED_STEPS
    from ridgeline.lab.simulate.measure import fit_server

    hardware = chip(args.hardware).name
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
