"""Runs the checks one after the other: a line for each, and how many failed.

python -m tests.gpu                     all of them
python -m tests.gpu memory determinism  those whose names hold one of the words
TRITON_INTERPRET=1 python -m tests.gpu  tried out without a GPU, at tiny sizes
"""

from __future__ import annotations

import sys
import time
import traceback

from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from tests.gpu.collection import Skipped, all_checks, has_device


def main(words: list[str]) -> int:
    if not has_device():
        print("torch sees no CUDA device")
        return 1
    if INTERPRETED:
        import tests.triton_interpreter  # noqa: F401
    failed = skipped = 0
    checks = {
        name: check for name, check in all_checks().items() if not words or any(w in name for w in words)
    }
    for name, check in checks.items():
        started = time.monotonic()
        try:
            check()
            outcome = "ok"
        except Skipped as reason:
            outcome = f"skipped: {reason}"
            skipped += 1
        except Exception:
            outcome = f"FAILED\n{traceback.format_exc()}"
            failed += 1
        print(f"{name} ({time.monotonic() - started:.1f} s): {outcome}", flush=True)
    print(f"{len(checks)} checks, {failed} failed, {skipped} skipped")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
