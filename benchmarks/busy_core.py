"""Decode beside a process that keeps one core busy: what is left of the quiet speed.

    python benchmarks/busy_core.py [--model smollm2-135m] [--isa avx2] [--llama-cpp DIR]

Quiet and busy samples come in turn, in one run; medians are shown. The busy process computes on the last CPU
that this one may use. Bar: 40 % of the quiet speed at 1 and at 8 streams. With --llama-cpp its figures stand
beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from versus import engine_rates
from versus.peer_llamacpp import CACHES, find

from ridgeline.machine import allowed_cpus, compute_threads
from ridgeline.models.files.pull import ensure
from ridgeline.ops.cpu.library import ISA_VARIABLE, choose_isa

PROMPT, TOKENS, STREAMS, BAR = 32, 128, (1, 8), 0.4
PEER_TOKENS = 24  # llama.cpp may take seconds for each beside a busy core
SPIN = """\
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("spins", flush=True)
while True:
    pass
"""


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes on the last allowed CPU for as long as the block lasts."""
    command = [sys.executable, "-c", SPIN, str(allowed_cpus()[-1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def compare(rate: Callable[[int], float], repeats: int) -> dict[int, tuple[float, float]]:
    """By number of streams: the medians of quiet and of busy samples."""
    samples: dict[tuple[int, bool], list[float]] = {}
    for _ in range(repeats):
        for streams in STREAMS:
            samples.setdefault((streams, False), []).append(rate(streams))
            with busy_core():
                samples.setdefault((streams, True), []).append(rate(streams))
    return {n: (statistics.median(samples[n, False]), statistics.median(samples[n, True])) for n in STREAMS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--isa", help="our instruction set (default: the best)")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-batched-bench and the others")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench-results/busy_core.json"))
    args = parser.parse_args()
    if args.isa:
        os.environ[ISA_VARIABLE] = args.isa
    path, rng, started = ensure(args.model).path, random.Random(0), time.monotonic()
    engine = engine_rates.load(path)
    found = {
        "ridgeline": compare(lambda n: engine_rates.decode_rate(engine, n, PROMPT, TOKENS, rng), args.repeats)
    }
    if args.llama_cpp:
        peer = find(args.llama_cpp, compute_threads())
        flags = (*CACHES[0], "--poll", "0")  # of its settings the one that spins least
        found["llama.cpp"] = compare(
            lambda n: peer.decode_rate(path, n, PROMPT, PEER_TOKENS, flags), args.repeats
        )
    print(
        f"{path.name}, {choose_isa(args.isa)}, {compute_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f} at the end"
    )
    for name, by_streams in found.items():
        for streams, (quiet, busy) in by_streams.items():
            verdict = (
                "" if name != "ridgeline" else "  pass" if busy >= BAR * quiet else f"  miss: bar {BAR:.0%}"
            )
            print(
                f"{name:<10} {streams:>2} streams: quiet {quiet:7.1f}, busy {busy:7.1f} tok/s"
                f" = {busy / quiet:.0%}{verdict}"
            )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"engine": name, "streams": streams, "quiet": quiet, "busy": busy, "share": busy / quiet}
        for name, by_streams in found.items()
        for streams, (quiet, busy) in by_streams.items()
    ]
    args.json.write_text(json.dumps({"isa": choose_isa(args.isa), "rows": rows}, indent=1))
    print(f"{time.monotonic() - started:.0f} s; written: {args.json}")


if __name__ == "__main__":
    main()
