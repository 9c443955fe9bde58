"""Every GPU kernel alone: right at the real shapes, then µs and the share of the machine's limit.

Runs `measure(report)` of the files in benchmarks/gpu, each checked against plain torch before it is timed.
Needs a CUDA device; without one (TRITON_INTERPRET=1) the files' own small shapes show that the code runs.

    python benchmarks/gpu_kernels.py [--only linear --only elementwise] [--json out.json]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, where it is not installed

from gpu.timing import Report

NAMES = ("linear", "decode_attention", "prefill_attention", "elementwise", "moe", "sampling")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=NAMES, help="one of the files; may be repeated")
    parser.add_argument("--json", type=Path, help="write every line here")
    arguments = parser.parse_args()
    where = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "no GPU: interpreted, times mean nothing"
    )
    print(f"{where}; torch {torch.__version__}", flush=True)
    results: dict[str, object] = {"device": where, "torch": torch.__version__}
    failed = []
    for name in arguments.only or NAMES:
        report = Report()
        report.heading(name)
        begin = time.monotonic()
        if importlib.util.find_spec(f"gpu.{name}") is None:
            print(f"benchmarks/gpu/{name}.py is not there", flush=True)
            continue
        try:
            importlib.import_module(f"gpu.{name}").measure(report)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"-- {name}: {time.monotonic() - begin:.1f} s, {len(report.wrong)} wrong", flush=True)
        failed += report.wrong
        results[name] = report.lines
        if arguments.json is not None:  # after each, so that a run cut short leaves what it has
            arguments.json.write_text(json.dumps(results, indent=1))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if failed:
        print(f"!!!!!! failed or wrong: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
