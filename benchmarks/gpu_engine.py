"""The GPU engine on seeded workloads: tokens per second beside the physical limit and the best peer.

    python benchmarks/gpu_engine.py --cases all                       both shapes, random weights, a table
    python benchmarks/gpu_engine.py --models qwen3-8b --cases decode-bs1,prefill --json result.json
    python benchmarks/gpu_engine.py --models qwen3-0.6b --cases decode-bs64 --profile

Needs a CUDA GPU and torch, triton and numpy alone. Every shape runs in its own process, so that the
start is a real one: from the launch of Python to the first token. Requests are those of
benchmarks/gpu/workloads.py, temperature 0.6, no detokenization, prefix caching on but empty before each run;
the best of --runs counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import limits as physical
from benchmarks.gpu.workloads import CASES, PEERS, SHAPES, UNITS, Work, workload, write_config

SHARED_TOKENS = {"shared-prefix": 4096}  # of every prompt: their KV need be read once a step, not once a row


def main() -> int:
    args = _arguments()
    if args.worker:
        return _worker(args)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            out = Path(folder) / f"{model}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--models", model, "--worker", str(out)]
            command += ["--started", str(time.monotonic())]
            code = subprocess.run(command).returncode
            if out.exists():
                results[model] = json.loads(out.read_text())
            if code:
                print(f"{model}: the process ended with {code}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    _print_table(results)
    return 0 if len(results) == len(args.models) else 1


# ── one shape, in its own process ─────────────────────────────────────────────────────────────────────────


def _worker(args: argparse.Namespace) -> int:
    from ridgeline.engine.config import EngineConfig
    from ridgeline.engine.start.build import build_engine

    (model,) = args.models
    config = EngineConfig(
        model=model,
        backend="cuda",
        load_format="dummy",
        overlap=not args.no_overlap,
        cuda_graphs=not args.no_graphs,
        deterministic=args.deterministic,
        prefix_cache=True,
        step_tokens=args.step_tokens,
        step_ring=1 << 16,
    )
    with tempfile.TemporaryDirectory() as folder:
        built = build_engine(config, write_config(model, Path(folder)))
    _run(built.core, [([1, 2, 3, 4, 5, 6, 7, 8], 1)])
    start_s = time.monotonic() - args.started
    budget = {name: round(seconds, 2) for name, seconds in built.budget.seconds.items()}
    print(f"{model}: {start_s:.2f} s from the launch of Python to the first token {budget}", flush=True)
    result: dict[str, Any] = {"start_s": start_s, "budget": budget, "cases": {}}
    out = Path(args.worker)
    for case in args.cases:
        if case not in PEERS[model] and not args.all_cases:
            continue
        result["cases"][case] = _measure(built, case, model, args.runs)
        if args.profile:
            from benchmarks.gpu.profile import print_profile

            built.core.scheduler.reset_prefix_cache()
            print_profile(built, lambda case=case: _run(built.core, workload(case)), case)
        out.write_text(json.dumps(result))
    receipt = getattr(built, "receipt", None)
    if receipt is not None:
        print("\n".join(receipt.lines()), flush=True)
    out.write_text(json.dumps(result))
    return 0


def _measure(built: Any, case: str, model: str, runs: int) -> dict[str, Any]:
    work = workload(case)
    walls: list[float] = []
    best: dict[str, Any] = {}
    for _ in range(runs):
        built.core.scheduler.reset_prefix_cache()
        before = len(built.core.steps.dump())
        wall_s = _run(built.core, work)
        walls.append(wall_s)
        if wall_s == min(walls):
            records = built.core.steps.dump()[before:]
            limit_s = physical.limit_seconds(built.spec, records, SHARED_TOKENS.get(case, 0))
            best = {"steps": len(records), "ms_per_step": 1e3 * wall_s / max(1, len(records))}
            best |= {"wall_s": wall_s, "limit_s": limit_s, "percent_of_limit": 100 * limit_s / wall_s}
    best["value"] = _value(case, work, best["wall_s"])
    best["unit"] = UNITS[case]
    best["walls_s"] = walls
    peer = PEERS[model].get(case)
    if peer is not None:
        best["ratio_to_best_peer"] = peer / best["value"] if case == "long" else best["value"] / peer
    print(f"{model} {case}: {_line(best)}", flush=True)
    return best


def _value(case: str, work: Work, wall_s: float) -> float:
    if UNITS[case] == "s":
        return wall_s
    tokens = sum(len(prompt) for prompt, _ in work) if UNITS[case] == "in tok/s" else sum(n for _, n in work)
    return tokens / wall_s


def _run(core: Any, work: Work) -> float:
    """Seconds for all of it; every request must come to its whole length."""
    from ridgeline.engine.schedule.request import Request, SamplingParams

    started = time.monotonic()
    for number, (prompt, count) in enumerate(work):
        params = SamplingParams(max_tokens=count, temperature=0.6, ignore_eos=True, seed=number)
        core.add(Request(f"bench-{started}-{number}", prompt, params, time.monotonic()))
    tokens = 0
    while core.has_work:
        for delta in core.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens += len(delta.tokens)
    wall_s = time.monotonic() - started
    wanted = sum(count for _, count in work)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came out, {wanted} were asked for")
    return wall_s


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────


def _line(case: dict[str, Any]) -> str:
    ratio = case.get("ratio_to_best_peer")
    return (
        f"{case['value']:,.{1 if case['unit'] == 's' else 0}f} {case['unit']}, "
        f"{case['percent_of_limit']:.0f} % of the limit, "
        + (f"{ratio:.2f}× the best peer, " if ratio is not None else "")
        + f"{case['ms_per_step']:.2f} ms a step, runs {', '.join(f'{w:.2f}' for w in case['walls_s'])} s"
    )


def _print_table(results: dict[str, Any]) -> None:
    for model, result in results.items():
        print(f"\n{model}: start to first token {result['start_s']:.1f} s")
        for case, figures in result["cases"].items():
            print(f"  {case:<14} {_line(figures)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes, by comma (default: all)")
    parser.add_argument("--cases", default="all", help=f"all, or by comma: {', '.join(CASES)}")
    parser.add_argument("--runs", type=int, default=2, help="the best of so many counts (default 2)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--profile", action="store_true", help="the top kernels of each case, after it")
    parser.add_argument("--step-tokens", type=int, help="most tokens of one step")
    parser.add_argument(
        "--no-overlap", action="store_true", help="read every step before the next is launched"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of every step")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.models = args.models.split(",")
    args.all_cases = args.cases != "all"
    args.cases = list(CASES) if args.cases == "all" else args.cases.split(",")
    for kind, given, known in (("shape", args.models, SHAPES), ("case", args.cases, CASES)):
        for name in given:
            if name not in known:
                parser.error(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
