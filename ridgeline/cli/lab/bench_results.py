"""`ridgeline bench report | compare | export | coldstart`: reports of runs, and cold starts."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.parsing import DEFAULT_MODEL, MODEL_HELP, add_subverb, path_argument

if TYPE_CHECKING:
    from ridgeline.lab.bench.cold_starts.cold_start import Start

INVALID = 1
DIALECTS = ("aiperf", "guidellm", "vllm")
COLDSTART_FILES = ("coldstart.json", "report.html")


def add_results(bench: argparse.ArgumentParser) -> None:
    _add_report(bench)
    _add_compare(bench)
    _add_export(bench)
    _add_coldstart(bench)


# ── bench report ─────────────────────────────────────────────────────────────────────────────────────────

REPORT = """\
Write the report of a run or a sweep again: one HTML file that loads nothing else. Every run writes its own;
this is for folders from another machine or an earlier version."""


def _add_report(bench: argparse.ArgumentParser) -> None:
    examples = "  ridgeline bench report bench-results/20260102-030405-run\n"
    parser = add_subverb(bench, "report", REPORT, examples)
    parser.add_argument("folder", metavar="DIR", type=path_argument, help="folder of the run or the sweep")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=path_argument,
        help="write the page to this file (default: report.html in the folder)",
    )
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from ridgeline.lab.bench.reports.report_file import write_report

    print(write_report(args.folder, args.out))
    return 0


# ── bench compare ────────────────────────────────────────────────────────────────────────────────────────

COMPARE = """\
Compare run B with run A: for every metric the difference and the ratio with intervals of 95 %, or that no
difference is seen, and how small a one would not have shown. Runs of the same traffic are compared request
by request. Says which settings differ, and whether a run is invalid (exit code 1)."""


def _add_compare(bench: argparse.ArgumentParser) -> None:
    examples = """\
  ridgeline bench compare bench-results/before bench-results/after
  ridgeline bench compare bench-results/before bench-results/before-again      first: A against A
  ridgeline bench compare bench-results/before bench-results/after --html comparison.html
"""
    parser = add_subverb(bench, "compare", COMPARE, examples)
    parser.add_argument("a", metavar="A", type=path_argument, help="folder of a run")
    parser.add_argument("b", metavar="B", type=path_argument, help="folder of another")
    parser.add_argument("--all", action="store_true", help="show every metric, not only the headlines")
    parser.add_argument("--html", metavar="FILE", type=path_argument, help="also write a page")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed the resampling (default: 0)")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    from ridgeline.lab.bench.compare.compare import compare
    from ridgeline.lab.bench.compare.comparison import comparison_page, comparison_text
    from ridgeline.lab.bench.compare.difference import side_of
    from ridgeline.lab.bench.figures.result import BenchResult

    sides = [side_of(BenchResult.load(folder), str(folder)) for folder in (args.a, args.b)]
    found = compare(*sides, seed=args.seed)
    print(comparison_text(found, every=args.all))
    if args.html:
        made_at = datetime.now().astimezone().isoformat(timespec="seconds")
        args.html.write_text(comparison_page(found, made_at=made_at), encoding="utf-8")
        print(f"page: {args.html}", file=sys.stderr)
    return INVALID if found.invalid else 0


# ── bench export ─────────────────────────────────────────────────────────────────────────────────────────

EXPORT = """\
Write a run in the files and field names of another tool, computed by that tool's formulas: names collide, so
none is copied. docs/bench-reports.md says what differs and what cannot be filled."""


def _add_export(bench: argparse.ArgumentParser) -> None:
    examples = """\
  ridgeline bench export bench-results/run --as aiperf
  ridgeline bench export bench-results/run --as vllm --out elsewhere
"""
    parser = add_subverb(bench, "export", EXPORT, examples)
    parser.add_argument("folder", metavar="DIR", type=path_argument, help="folder of the run")
    parser.add_argument(
        "--as", dest="dialect", choices=DIALECTS, required=True, help="write the files of this tool"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=path_argument,
        help="write to this folder (default: a folder of that name in DIR)",
    )
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    from ridgeline.lab.bench.exports import export, facts_of
    from ridgeline.lab.bench.figures.result import BenchResult

    result = BenchResult.load(args.folder)
    if not result.validity.valid:
        print(f"ridgeline: this run is INVALID: {'; '.join(result.validity.reasons)}", file=sys.stderr)
    for path in export(facts_of(result), args.dialect, args.out or args.folder / args.dialect):
        print(path)
    return 0


# ── bench coldstart ──────────────────────────────────────────────────────────────────────────────────────

COLDSTART = """\
Start a server again and again, and measure from the spawn: port open, ready, first token, second token; then
a second request, which is warm. The page cache is warm (one start before, not counted), or dropped where that
is permitted; the result says which. Started servers are always stopped."""


def _add_coldstart(bench: argparse.ArgumentParser) -> None:
    examples = """\
  ridgeline bench coldstart smollm2-135m
  ridgeline bench coldstart smollm2-135m --repeats 10 --page-cache dropped
  ridgeline bench coldstart --command 'llama-server -m model.gguf --port {port}'
"""
    parser = add_subverb(bench, "coldstart", COLDSTART, examples)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"for `ridgeline serve`: {MODEL_HELP} (default: {DEFAULT_MODEL}); with --command its name there",
    )
    parser.add_argument(
        "--command", metavar="TEXT", help="start another server with this command; {port} stands for its port"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=5, help="start this many times (default: 5)"
    )
    parser.add_argument(
        "--page-cache",
        choices=("warm", "dropped", "as-is"),
        default="warm",
        help="state of the page cache before every start (default: warm)",
    )
    parser.add_argument(
        "--evict",
        metavar="PATH",
        type=path_argument,
        action="append",
        default=[],
        help="with --page-cache dropped, where the machine's cannot be: drop these files' pages",
    )
    parser.add_argument(
        "--timeout-s",
        metavar="X",
        type=float,
        default=600.0,
        help="fail a start after this many seconds (default: 600)",
    )
    parser.add_argument("--out", metavar="DIR", type=path_argument, help="keep the result in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run_coldstart)


def run_coldstart(args: argparse.Namespace) -> int:
    import msgspec

    from ridgeline.lab.bench.cold_starts.cold_start import ColdStartConfig, cold_starts
    from ridgeline.lab.bench.cold_starts.report import cold_start_page, cold_start_text

    # A server with its own state directory: with the user's it would resume their batches.
    with tempfile.TemporaryDirectory(prefix="ridgeline-coldstart-") as state:
        own = _serve_command(args.model or DEFAULT_MODEL, state)
        config = ColdStartConfig(
            shlex.split(args.command) if args.command else own,
            repeats=args.repeats,
            model=(args.model or "") if args.command else "",
            page_cache="as_is" if args.page_cache == "as-is" else args.page_cache,
            evict=args.evict or _own_files(args),
            timeout_s=args.timeout_s,
        )
        found = cold_starts(config, lambda number, start: _say(number, args.repeats, start))
    print(msgspec.json.encode(found).decode() if args.json else cold_start_text(found))
    folder = args.out or Path("bench-results") / f"{datetime.now():%Y%m%d-%H%M%S}-coldstart"
    data, page = (folder / name for name in COLDSTART_FILES)
    found.save(data)
    page.write_text(cold_start_page(found), encoding="utf-8")
    print(f"kept in {folder}", file=sys.stderr)
    return INVALID if any(start.failure for start in found.starts) else 0


def _serve_command(model: str, state: str) -> list[str]:
    flags = ["--port", "{port}", "--state-dir", state]
    return [sys.executable, "-m", "ridgeline.cli.main", "serve", model, *flags]


def _own_files(args: argparse.Namespace) -> list[Path]:
    """Files that `ridgeline serve` reads: the model's files, and their packed copies."""
    if args.command or args.page_cache != "dropped":
        return []
    from ridgeline.models.files.registry import resolve
    from ridgeline.models.weights.packed_cache import packed_dir

    places = [resolve(args.model or DEFAULT_MODEL).path, packed_dir()]
    return [place for place in places if place.exists()]


def _say(number: int, of: int, start: Start) -> None:
    name = f"start {number} of {of}" if number else "start before, to warm the page cache"
    took = (
        f"first token after {start.first_token_s:.2f} s" if start.first_token_s is not None else start.failure
    )
    print(f"{name}: {took}", file=sys.stderr)
