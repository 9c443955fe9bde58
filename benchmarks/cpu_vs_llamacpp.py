"""Ridgeline and llama.cpp on the same cores: decode, prefill, HTTP, start-up, memory, each against its bar.

Everything of a row is measured interleaved in one run: ours, then each of the peer's finalists, again and
again; medians and spreads are shown, and beside each figure its percent of the limit measured in that run.
Ours runs with its defaults, the peer with the best flags and format found for the row. A sample during which
others took the machine is repeated. Prints a table and writes JSON.

    python benchmarks/cpu_vs_llamacpp.py --llama-cpp DIR [--isa avx2] [--only smollm2.decode] [--all] [--tune]

docs/performance/cpu-vs-llamacpp.md has the method, and how to get a llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rich.console import Console
from versus.bench import Bench, machine
from versus.comparison import table_of
from versus.engine_rows import ComparedModel, engine_rows
from versus.peer_llamacpp import FORMATS, LlamaCpp, find
from versus.quantized_files import kind_of, write_folder
from versus.random_gguf import GRANITE_MOE, TINYLLAMA, write_random_gguf
from versus.server_rows import http_rows, process_rows

from ridgeline import __version__
from ridgeline.machine import cache_dir, compute_threads
from ridgeline.models.files.pull import ensure
from ridgeline.ops.cpu.library import ISA_VARIABLE, choose_isa


@dataclass(frozen=True)
class Bars:
    """Ours over llama.cpp with the same instruction set: at least, and of time to first token at most."""

    smollm2: dict[int, float]  # decode, by number of streams
    smollm2_prefill: float
    qwen: dict[int, float]
    qwen_prefill: float
    http_output: float
    ttft_warm: float
    decode_percent: float | None = None  # of the limit, SmolLM2 with one stream
    prefill_percent: float | None = None


AVX2 = Bars(
    {1: 1.5, 4: 2.2, 8: 2.2, 32: 2.2}, 2.0, {1: 1.0, 8: 2.0}, 2.0, 2.5, 1 / 3,
    decode_percent=75.0, prefill_percent=60.0,
)  # fmt: skip
AVX512 = Bars({1: 1.7, 4: 2.7, 8: 2.7, 32: 2.7}, 3.2, {1: 1.0, 8: 2.2}, 2.5, 4.0, 1 / 4)
# Without --only and --all: what fits into ten minutes with kept flags.
SHORT = ("smollm2", "http", "start", "qwen-coder")


def bars_of(isa: str) -> Bars:
    return AVX512 if isa.startswith(("avx512", "amx")) else AVX2


def compared_models(smollm2: dict[str, Path], bars: Bars = AVX512) -> list[ComparedModel]:
    """The models whose decode and prefill are compared, and their bars."""
    random_file = cache_dir() / "bench" / f"{TINYLLAMA.name}-Q4_0.gguf"
    moe_file = cache_dir() / "bench" / f"{GRANITE_MOE.name}-Q4_0.gguf"
    return [
        ComparedModel(
            "smollm2",
            "SmolLM2-135M",
            lambda: smollm2,
            bars.smollm2,
            prefill_bar=bars.smollm2_prefill,
            least_percent_of_limit=bars.decode_percent,
            prefill_percent_of_limit=bars.prefill_percent,
        ),
        ComparedModel(
            "tinyllama",
            "1.1B shape, random weights, Q4_0",
            lambda: {"Q4_0": write_random_gguf(TINYLLAMA, random_file)},
            {1: 1.0, 8: 1.7, 32: 1.7},
            prefill_bar=3.0,
            is_large=True,
            least_percent_of_limit=80.0,
        ),
        # The DRAM-bound row: both engines read the same file, as published.
        ComparedModel(
            "qwen-coder",
            "Qwen2.5-Coder-1.5B, Q4_K_M",
            lambda: {"Q4_K_M": ensure("qwen2.5-coder-1.5b").path},
            bars.qwen,
            prefill_bar=bars.qwen_prefill,
            is_large=True,
        ),
        # Of 32 experts a token uses 8: 0.24 GB of 0.75 are read for one stream.
        ComparedModel(
            "moe",
            "1.3B-A0.4B shape (Granite-3.0-1B-A400M), random weights, Q4_0",
            lambda: {"Q4_0": write_random_gguf(GRANITE_MOE, moe_file)},
            {1: 1.0, 8: 1.7},
            prefill_bar=2.0,
            is_large=True,
            least_percent_of_limit=70.0,
        ),
    ]


# A kind of checkpoint → types of as many bits of llama.cpp, which reads no safetensors. Its file has the same
# embedding in bfloat16, which is the head of both models.
PUBLISHED = {"gptq": ("Q4_0",), "awq": ("Q4_0", "Q4_1"), "fp8": ("Q8_0",)}


def published_models(peer: LlamaCpp, smollm2: Path) -> list[ComparedModel]:
    """Checkpoints of GPTQ, AWQ and FP8 tools, beside llama.cpp's best file of as many bits."""
    folder = cache_dir() / "bench" / "published"

    def compared(
        name: str, title: str, source: Callable[[], Path], group: int, kind: str, bar: float
    ) -> ComparedModel:
        def files() -> dict[str, Path]:
            return {
                format: peer.quantize(source(), folder / f"{name}-{format}.gguf", format, "bf16")
                for format in PUBLISHED[kind]
            }

        return ComparedModel(
            f"{kind}.{name}",
            f"{title}, {kind.upper()}; llama.cpp: a GGUF file of as many bits",
            files,
            {1: bar, 8: 2.2},
            prefill_bar=2.5,
            is_large=True,
            ours=lambda: write_folder(source(), folder / f"{name}-{kind}", kind_of(kind, group)),
        )

    def qwen() -> Path:
        return ensure("qwen2.5-coder-1.5b").path

    return [
        model
        for kind in PUBLISHED
        for model in (
            compared("smollm2", "SmolLM2-135M", lambda: smollm2, 64, kind, 1.5),
            compared("qwen-coder", "Qwen2.5-Coder-1.5B", qwen, 128, kind, 1.0),
        )
    ]


def prepare(args: argparse.Namespace, console: Console) -> Bench:
    """The peer and the models; SystemExit with the way to get a llama.cpp when there is none."""
    peer = find(args.llama_cpp, compute_threads())
    isa = choose_isa(args.isa)
    uses = peer.has_avx512()
    if uses is not None and uses != isa.startswith(("avx512", "amx")):
        raise SystemExit(
            f"{peer.folder} is built {'with' if uses else 'without'} AVX-512, and ours runs with {isa}: give "
            "the build for the same instruction set (docs/performance/cpu-vs-llamacpp.md has the lines)"
        )
    folder = cache_dir() / "bench"
    q4_1 = ensure("smollm2-135m").path
    made = {f: peer.quantize(q4_1, folder / f"smollm2-{f}.gguf", f) for f in FORMATS if f != "Q4_1"}
    return Bench(
        peer=peer,
        smollm2={"Q4_1": q4_1, **made},
        repeats=args.repeats,
        patience_s=args.patience,
        attempts=args.attempts,
        tune_again=args.tune,
        wanted=lambda key: any(key.startswith(one) for one in args.only or ([""] if args.all else SHORT)),
        console=console,
        isa=isa,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-bench, llama-server and the others")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--attempts", type=int, default=4, help="tries of a sample that others disturb")
    parser.add_argument("--tune", action="store_true", help="look for the peer's best flags again")
    parser.add_argument(
        "--only", action="append", metavar="KEY",
        help="rows whose key begins so: smollm2.decode.8, http, start, memory, tinyllama, qwen-coder, moe, "
        "gptq, awq, fp8.smollm2",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help="every row; without it: SmolLM2, HTTP, start, the 1.5B model"
    )
    parser.add_argument(
        "--isa", help="our instruction set (default: the best); --llama-cpp is a build for the same one"
    )
    parser.add_argument(
        "--json", type=Path, help="file for the results (default: bench-results/cpu_vs_llamacpp.ISA.json)"
    )
    args = parser.parse_args()
    if args.isa:
        os.environ[ISA_VARIABLE] = args.isa  # for the servers too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped on the way out
    console = Console(width=150)
    bench = prepare(args, console)
    bars, started = bars_of(bench.isa), time.monotonic()
    console.log(f"peer: {bench.peer.version()}; machine: {machine()}; instruction set: {bench.isa}")
    rows = []
    published = published_models(bench.peer, bench.smollm2["Q4_1"])
    for model in [*compared_models(bench.smollm2, bars), *published]:
        part = engine_rows(bench, model)
        if model.name == "smollm2":
            part += http_rows(bench, bars.http_output, bars.ttft_warm)
        if part:
            console.print(table_of(f"{model.title}, {bench.isa}", part))
        rows += part
    if processes := process_rows(bench):
        console.print(table_of(f"start and memory, {bench.isa}", processes))
        rows += processes
    report = {
        "version": __version__,
        "peer": bench.peer.version(),
        "machine": machine(),
        "isa": bench.isa,
        "seconds": time.monotonic() - started,
        "threads": bench.peer.threads,
        "ceilings": {name: vars(one) for name, one in bench.ceilings.items()},
        "rows": [row.as_dict() for row in rows],
    }
    path = args.json or Path(f"bench-results/cpu_vs_llamacpp.{bench.isa}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    print(f"{report['seconds']:.0f} s; written: {path}")


if __name__ == "__main__":
    main()
