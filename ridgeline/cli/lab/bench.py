"""`ridgeline bench`: measures a server under load; its sub-verbs have their own files beside this one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.flags.aliases import add_aliases
from ridgeline.cli.lab.bench_results import add_results
from ridgeline.cli.lab.bench_sweep import add_sweep
from ridgeline.cli.parsing import Verbs, add_subverb, add_verb, path_argument
from ridgeline.cli.source import API_KEY_VARIABLE
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import add_flags, build, given_flags

if TYPE_CHECKING:
    from ridgeline.lab.bench.config import ClosedLoop, OpenLoop
    from ridgeline.lab.bench.figures.result import BenchResult

RESULTS = Path("bench-results")
EXIT_INTERRUPTED = 130
INVALID = 1

DESCRIPTION = """\
Measure a server that speaks OpenAI's API: ours, vLLM, llama-server, a hosted one. With --rate or a trace,
requests are sent at their planned moments, whatever the server does (open loop). With --concurrency, that
many are in flight at all times (closed loop). Every figure has its formula, its interval and, where the
server reports it, the machine's limit. First the bench measures a server of known latencies at the same
load, and refuses to run if it does not find them. Flags of `vllm bench serve` are accepted: --num-prompts 200
--request-rate 5."""

EXAMPLES = """\
  ridgeline bench http://127.0.0.1:8000 --concurrency 8 --requests 200
  ridgeline bench http://127.0.0.1:8000 --rate 5 --input 1000 --output 200 --slo ttft=400,tpot=50
  ridgeline bench http://127.0.0.1:8000 --traffic azure:AzureLLMInferenceTrace_conv.csv --window-s 300
  ridgeline bench https://api.example.com/v1 --model NAME --api chat --concurrency 4
  ridgeline bench http://127.0.0.1:8000 --rate 20 --max-concurrency 64
  ridgeline bench http://127.0.0.1:8000 --num-prompts 200 --request-rate inf --max-concurrency 8
  ridgeline bench http://127.0.0.1:8000 --traffic prompts:mine.jsonl --api chat --concurrency 4
  ridgeline bench selftest --rate 500
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "bench", "measure a server", DESCRIPTION, EXAMPLES)
    parser.add_argument("url", metavar="URL", help="the server's address, as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help=f"key for the server (default: ${API_KEY_VARIABLE})")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=path_argument,
        help=f"save the run in this folder (default: {RESULTS}/DATE-NAME)",
    )
    parser.add_argument("--json", action="store_true", help="print run.json instead of the tables")
    add_flags(parser, "bench", BenchOptions, title="the run")
    add_flags(parser, "traffic", TrafficOptions, title="the traffic")
    add_aliases(parser)
    parser.set_defaults(run=run)
    _add_selftest(parser)
    add_results(parser)

    add_sweep(parser)


def run(args: argparse.Namespace) -> int:
    options = build(BenchOptions, given_flags(args, "bench"))
    traffic_options = build(TrafficOptions, given_flags(args, "traffic"))
    if options.concurrency is not None and traffic_options.rate is not None:
        raise BadInput(
            "--concurrency is a closed loop and --rate an open one: give one of them, or --rate with "
            "--max-concurrency"
        )
    from ridgeline.lab.bench.client.target import reach
    from ridgeline.lab.bench.config import config_of
    from ridgeline.lab.bench.progress import shown
    from ridgeline.lab.bench.reports.report_file import write_report
    from ridgeline.lab.bench.run import in_loop, run_bench
    from ridgeline.lab.traffic.describe import describe
    from ridgeline.lab.traffic.source import build_traffic

    traffic = build_traffic(traffic_options)
    folder = args.out or _folder(options.name or traffic.name)
    key = args.api_key or os.environ.get(API_KEY_VARIABLE, "")
    config = config_of(args.url, options, traffic, api_key=key, seed=traffic_options.seed)
    in_loop(reach(args.url, options.connect_s))
    for line in describe(traffic).lines():
        print(line, file=sys.stderr)
    facts: dict[str, Any] = {"skipped": "--no-selftest"}
    if options.selftest:
        facts = _self_test(config.mode, config.traffic.duration_s, len(traffic.requests))
    with _made(folder), shown(sys.stderr) as on_progress:
        result = in_loop(run_bench(config, on_progress, facts))
    result.save(folder)
    write_report(folder)
    _show(result, folder, args.json)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.validity.valid else INVALID


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create the folder before the run, so that a run can be saved; remove it if there was no run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder}: cannot save a run there: {error.strerror}; give another --out") from error
    if not os.access(folder, os.W_OK):
        raise BadInput(f"{folder}: cannot save a run there: not writable; give another --out")
    try:
        yield
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise


def _self_test(mode: ClosedLoop | OpenLoop, seconds: float, requests: int) -> dict[str, Any]:
    """Refuses, with the reason, if the client does not find the known latencies."""
    from ridgeline.lab.bench.selftest import passed_before

    print("self-test: a server of known latencies at this load …", file=sys.stderr)
    return passed_before(mode, requests / seconds if seconds else 0.0).facts()


def _show(result: BenchResult, folder: Path, as_json: bool) -> None:
    from ridgeline.lab.bench.figures.result import RUN_FILE
    from ridgeline.lab.bench.reports.text_summary import text_of

    print((folder / RUN_FILE).read_text() if as_json else text_of(result))
    print(f"kept in {folder}", file=sys.stderr)


def _folder(name: str) -> Path:
    words = "".join(mark if mark.isalnum() or mark in "-_." else "-" for mark in name.lower())
    return RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}-{words.strip('-')[:60] or 'run'}"


# ── bench selftest ───────────────────────────────────────────────────────────────────────────────────────

SELFTEST = """\
Measure a built-in server whose TTFT and TPOT are known, in another process of this machine. The bench
must find them within 2 ms or 2 %; exit code 1 if it does not."""


def _add_selftest(bench: argparse.ArgumentParser) -> None:
    examples = "  ridgeline bench selftest --rate 500\n  ridgeline bench selftest --concurrency 64\n"
    parser = add_subverb(bench, "selftest", SELFTEST, examples)
    parser.add_argument(
        "--rate", type=float, metavar="X", help="send this many requests per second, open loop (default: 500)"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="keep this many requests in flight instead, closed loop"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="X", help="measure for this many seconds (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=run_selftest)


def run_selftest(args: argparse.Namespace) -> int:
    if args.rate is not None and args.concurrency is not None:
        raise BadInput("--concurrency is a closed loop and --rate an open one: give one of them")
    rate = 500.0 if args.rate is None else args.rate
    if rate <= 0 or args.seconds <= 0 or (args.concurrency is not None and args.concurrency < 1):
        raise BadInput("--rate, --concurrency and --seconds must be above 0")
    import json

    from ridgeline.lab.bench.config import ClosedLoop, OpenLoop
    from ridgeline.lab.bench.run import in_loop
    from ridgeline.lab.bench.selftest import self_test

    mode = OpenLoop() if args.concurrency is None else ClosedLoop(args.concurrency)
    test = in_loop(self_test(mode, rate, args.seconds))
    print(json.dumps(test.facts(), indent=1) if args.json else "\n".join(test.lines()))
    return INVALID if test.failure else 0
