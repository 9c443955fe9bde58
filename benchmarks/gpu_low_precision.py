"""Low precision on one GPU, every bar of it in one run of less than nine minutes: products in FP8, int8 and
int4 by the number of tokens, attention over an 8-bit cache, then the engine, with bf16 beside each.

    python benchmarks/gpu_low_precision.py                    all; JSON to $OUT, or build/gpu-low-precision
    python benchmarks/gpu_low_precision.py --only kernels     gates, products and attention
    python benchmarks/gpu_low_precision.py --only qwen3-8b-fp8,qwen3-8b-bf16 --cases decode-bs1

Needs a CUDA device, torch, triton and numpy. Each part runs in a separate process: one that fails is a line
in the table and the others go on. Weights are random, rounded when they are made (`--weights`). The limit of
a step is its bytes over 4.27 TB/s or its operations over the matrix rate, 1,451 TFLOP/s for FP8 and 791 for
the others; both were measured on an H200. Without a GPU (TRITON_INTERPRET=1) `--only kernels` shows that the
code runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

SECONDS = 530.0  # for all parts together
LEAST_S = 25.0  # a part is not begun with less
FP8_FLOPS, OTHER_FLOPS = 1451e12, 791e12
READ_BYTES_PER_S = 4.27e12


@dataclass(frozen=True, slots=True)
class Engine:
    model: str
    weights: str = "auto"
    kv: str = "auto"
    cases: tuple[str, ...] = ("decode-bs1", "decode-bs64", "prefill", "offline-mix")

    @property
    def name(self) -> str:
        kv = "" if self.kv == "auto" else f"-kv-{self.kv}"
        return f"{self.model}-{'bf16' if self.weights == 'auto' else self.weights}{kv}"


# The most important first: what no time is left for is named.
ENGINES = (
    Engine("qwen3-8b"),
    Engine("qwen3-8b", "fp8"),
    Engine("qwen3-8b", "int4", cases=("decode-bs1", "decode-bs64", "prefill")),
    Engine("qwen3-30b-a3b", "fp8", cases=("decode-bs64", "prefill")),
    Engine("qwen3-30b-a3b", cases=("decode-bs64", "prefill")),
    Engine("qwen3-8b", "fp8", "fp8", cases=("decode-bs64",)),
    Engine("qwen3-8b", "int8", cases=("decode-bs1", "prefill")),
)
# tok/s, or a ratio to bf16 in the same run.
BARS: dict[tuple[str, str], float] = {
    ("qwen3-8b-fp8", "decode-bs1"): 400,
    ("qwen3-8b-fp8", "decode-bs64"): 7_300,
    ("qwen3-8b-fp8", "prefill"): 68_000,
    ("qwen3-8b-fp8", "offline-mix"): 14_000,
    ("qwen3-8b-int4", "decode-bs1"): 520,
    ("qwen3-30b-a3b-fp8", "decode-bs64"): 5_000,
}
RATIO_BARS: dict[tuple[str, str], float] = {
    ("qwen3-8b-int4", "prefill"): 0.95,
    ("qwen3-30b-a3b-fp8", "prefill"): 1.0,
}
KERNEL_BARS = {"layer int4 g128 T=16": 2.0, "attention fp8 over bf16": 1.6, "attention int8 over bf16": 1.6}


def main() -> int:
    args = _arguments()
    if args.worker == "kernels":
        return _kernels(args.json)
    if args.worker:
        return _engine(next(each for each in ENGINES if each.name == args.worker), args)
    folder = args.out or Path(os.environ.get("OUT") or HERE.parent / "build" / "gpu-low-precision")
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds
    results: dict[str, Any] = {"engines": {}, "failed": {}}
    parts = [name for name in ("kernels", *(each.name for each in ENGINES)) if name in args.only]
    for name in parts:
        part = _in_a_process(name, folder, until, args)
        (results if name == "kernels" else results["engines"])[name] = part.pop("result", None)
        if part["failure"]:
            results["failed"][name] = part["failure"]
        (folder / "low-precision.json").write_text(json.dumps(results, indent=1))
    _print_table(results)
    return 1 if results["failed"] else 0


def _in_a_process(name: str, folder: Path, until: float, args: argparse.Namespace) -> dict[str, Any]:
    left = until - time.monotonic()
    if left < LEAST_S:
        return {"failure": "no time was left"}
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, __file__, "--worker", name, "--json", str(out), "--runs", str(args.runs)]
    command += ["--cases", ",".join(args.cases)] if args.cases else []
    print(f"\n## {name} ({left:.0f} s left)", flush=True)
    out.unlink(missing_ok=True)
    failure = ""
    with log.open("w") as lines:
        child = subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(left)
            failure = f"the process ended with {code}: {_last_line(log)}" if code else ""
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            failure = "stopped: no time was left"
    print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    found = json.loads(out.read_text()) if out.exists() else None
    return {"result": found, "failure": failure}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


# ── the parts, each in its own process ────────────────────────────────────────────────────────────────────


def _kernels(out: Path) -> int:
    from gpu.low_precision import measure
    from gpu.timing import Report

    report = Report()
    try:
        measure(report)
    finally:
        out.write_text(json.dumps({"lines": report.lines, "wrong": report.wrong}))
    if report.wrong:
        print(f"wrong or failed: {', '.join(report.wrong)}", flush=True)
    return 1 if report.wrong else 0


def _engine(engine: Engine, args: argparse.Namespace) -> int:
    from benchmarks.gpu.workloads import UNITS, workload, write_config
    from benchmarks.gpu_engine import _run, _value
    from ridgeline.engine.config import EngineConfig
    from ridgeline.engine.start.build import build_engine

    config = EngineConfig(
        model=engine.model,
        backend="cuda",
        load_format="dummy",
        weights=engine.weights,  # type: ignore[arg-type]
        kv_dtype=engine.kv,  # type: ignore[arg-type]
        step_ring=1 << 16,
    )
    with tempfile.TemporaryDirectory() as folder:
        built = build_engine(config, write_config(engine.model, Path(folder)))
    print(built.summary, *built.notes, sep="\n", flush=True)
    result: dict[str, Any] = {"summary": built.summary, "notes": built.notes, "cases": {}}
    failed = False
    for case in args.cases or engine.cases:
        try:
            work, best = workload(case), {}
            for _ in range(1 if case == "offline-mix" else args.runs):
                built.core.scheduler.reset_prefix_cache()
                before = len(built.core.steps.dump())
                wall_s = _run(built.core, work)
                records = built.core.steps.dump()[before:]
                if not best or wall_s < best["wall_s"]:
                    limit_s = sum(_limit_s(built, engine, record) for record in records)
                    best = {"wall_s": wall_s, "limit_s": limit_s, "of_limit": limit_s / wall_s}
            best |= {"value": _value(case, work, best["wall_s"]), "unit": UNITS[case], "steps": len(records)}
        except Exception as error:
            best, failed = {"failure": f"{type(error).__name__}: {error}"[:300]}, True
        result["cases"][case] = best
        print(case, best, flush=True)
        args.json.write_text(json.dumps(result))
    if built.receipt is not None:
        result["bytes"] = built.receipt.as_bytes()
        print(*built.receipt.lines(), sep="\n", flush=True)
    args.json.write_text(json.dumps(result))
    return 1 if failed else 0


def _limit_s(built: Any, engine: Engine, record: Any) -> float:
    """As benchmarks/gpu/limits.py, with the layers' matrices and the cache at their own sizes."""
    from benchmarks.gpu.limits import matrices_read, prompt_attention_flops
    from ridgeline.models.spec.cache_layout import CacheElement, CacheLayout

    spec = built.spec
    tokens = record.decode_batch + record.prefill_tokens
    samples = record.decode_batch + record.prefill_rows
    of_matrix = {"auto": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}[engine.weights]
    kv = CacheLayout.of(spec, CacheElement(2) if engine.kv == "auto" else CacheElement(1, scale_bytes=4))
    read = of_matrix * matrices_read(spec, tokens) + 2 * spec.vocab_size * spec.hidden_size
    read += record.decode_context * kv.token_bytes
    rate = FP8_FLOPS if engine.weights in ("fp8", "int8") else OTHER_FLOPS
    attention = 4 * spec.num_heads * spec.head_dim * spec.num_layers * record.decode_context
    in_16_bits = samples * spec.lm_head_flops + attention + prompt_attention_flops(spec, record)
    compute_s = tokens * spec.matmul_flops_per_token / rate + in_16_bits / OTHER_FLOPS
    return float(max(read / READ_BYTES_PER_S, compute_s))


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────


def _print_table(results: dict[str, Any]) -> None:
    print("\n== products and attention: µs, × bf16, share of the limit")
    kernels = results.get("kernels") or {"lines": [], "wrong": []}
    for line in kernels["lines"]:
        if "bf16_ratio" in line:
            bar = KERNEL_BARS.get(line["name"])
            words = f"  bar {bar} {'met' if line['bf16_ratio'] >= bar else 'missed'}" if bar else ""
            us, limit = line.get("us", 0.0), line.get("of_limit", 0.0)
            print(f"{line['name']:<34}{us:>9.1f} {line['bf16_ratio']:>6.2f} × {limit:>5.0%}{words}")
    checks = [line for line in kernels["lines"] if "allowed" in line]
    print(f"gates: {len(checks)} checks, wrong: {', '.join(kernels['wrong']) or 'none'}")
    print("\n== engines: tok/s, share of the limit, × bf16, bar")
    for name, result in results["engines"].items():
        for case, found in ((result or {}).get("cases") or {}).items():
            print(f"{name:<24}{case:<14}{_case(results, name, case, found)}")
    for name, reason in results["failed"].items():
        print(f"FAILED {name}: {reason}")


def _case(results: dict[str, Any], name: str, case: str, found: dict[str, Any]) -> str:
    if "failure" in found:
        return f"failed: {found['failure']}"
    model = next(each.model for each in ENGINES if each.name == name)
    beside = ((results["engines"].get(f"{model}-bf16") or {}).get("cases") or {}).get(case, {})
    ratio = found["value"] / beside["value"] if beside.get("value") else None
    text = f"{found['value']:>10,.0f} {found['of_limit']:>5.0%}"
    text += f" {ratio:>6.2f} ×" if ratio is not None else " " * 9
    for bars, value in ((BARS, found["value"]), (RATIO_BARS, ratio)):
        bar = bars.get((name, case))
        if bar is not None and value is not None:
            text += f"  bar {bar:,g} {'met' if value >= bar else 'missed'}"
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["kernels", *(each.name for each in ENGINES)]
    parser.add_argument("--only", default=",".join(names), help=f"parts, by comma: {', '.join(names)}")
    parser.add_argument("--cases", default="", help="cases of the engines, by comma (default: their own)")
    parser.add_argument("--runs", type=int, default=2, help="the best of so many counts (default 2)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts (default {SECONDS:g})")
    parser.add_argument("--out", type=Path, help="folder of the JSON files and logs (default $OUT)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.only, args.cases = args.only.split(","), [case for case in args.cases.split(",") if case]
    for name in args.only:
        if name not in names:
            parser.error(f"unknown part {name!r}; known: {', '.join(names)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
