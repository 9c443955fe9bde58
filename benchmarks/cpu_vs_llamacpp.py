"""Ridgeline and llama.cpp on the same cores: decode, prefill, HTTP, start-up, memory, each against its bar.

Everything of a row is measured interleaved in one run: ours, then each of the peer's finalists, again and
again; medians and spreads are shown, and beside each figure its percent of the limit measured in that run.
Ours runs with its defaults, the peer with the best flags and format found for the row. A sample during which
others took the machine is repeated. Prints a table and writes JSON.

    python benchmarks/cpu_vs_llamacpp.py --llama-cpp DIR [--repeats 5] [--only smollm2.decode] [--tune]

docs/performance/cpu-vs-llamacpp.md has the method, and how to get a llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rich.console import Console
from versus.bench import Bench, machine
from versus.comparison import table_of
from versus.engine_rows import ComparedModel, engine_rows
from versus.peer_llamacpp import FORMATS, find
from versus.random_gguf import GRANITE_MOE, TINYLLAMA, write_random_gguf
from versus.server_rows import http_rows, process_rows

from ridgeline import __version__
from ridgeline.machine import cache_dir, usable_cpus
from ridgeline.models.files.pull import ensure


def compared_models(smollm2: dict[str, Path]) -> list[ComparedModel]:
    """The models whose decode and prefill are compared, and their bars."""
    random_file = cache_dir() / "bench" / f"{TINYLLAMA.name}-Q4_0.gguf"
    moe_file = cache_dir() / "bench" / f"{GRANITE_MOE.name}-Q4_0.gguf"
    return [
        ComparedModel(
            "smollm2", "SmolLM2-135M", lambda: smollm2, {1: 1.7, 4: 2.2, 8: 2.2, 32: 2.5}, prefill_bar=4.0
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
            {1: 1.0, 8: 2.2},
            prefill_bar=2.5,
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


def prepare(args: argparse.Namespace, console: Console) -> Bench:
    """The peer and the models; SystemExit with the way to get a llama.cpp when there is none."""
    peer = find(args.llama_cpp, usable_cpus())
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
        wanted=lambda key: any(key.startswith(one) for one in args.only or [""]),
        console=console,
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
        help="rows whose key begins so: smollm2.decode.8, http, start, memory, tinyllama, qwen-coder, moe",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("bench-results/cpu_vs_llamacpp.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped on the way out
    console = Console(width=150)
    bench = prepare(args, console)
    console.log(f"peer: {bench.peer.version()}; machine: {machine()}")
    rows = []
    for model in compared_models(bench.smollm2):
        part = engine_rows(bench, model)
        if model.name == "smollm2":
            part += http_rows(bench) + process_rows(bench)
        if part:
            console.print(table_of(model.title, part))
        rows += part
    report = {
        "version": __version__,
        "peer": bench.peer.version(),
        "machine": machine(),
        "threads": bench.peer.threads,
        "ceilings": {name: vars(one) for name, one in bench.ceilings.items()},
        "rows": [row.as_dict() for row in rows],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
