"""Compiles the kernels of larger steps in a child process while the engine serves.

Compiling holds the GIL too often to run in the engine's process. The child dry-runs the steps (see
`run.cuda.warm`) and compiles what they launch into Triton's disk cache, where the engine finds it on first
use. It opens no GPU: it is told the target architecture. It never outlives the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# -P: do not import modules such as a user's random.py from the current directory.
PROGRAM = (sys.executable, "-P", "-m", "ridgeline.engine.start.compile_ahead")
NICENESS = 10
PARENT_POLL_S = 0.25


def compile_ahead(dry_run: dict[str, Any], decode_sizes: list[int]) -> None:
    """Let the child compile what a `StepDryRun` with these arguments launches; returns when it has ended.
    Errors are only logged: the engine compiles what is missing from the cache."""
    try:
        answer = _answer(pickle.dumps((os.getpid(), dry_run, decode_sizes)))
    except Exception as error:
        log.warning("could not compile kernels ahead: %s", _in_a_line(error))
        return
    log.info("%d kernels compiled ahead in %.1f s", answer["kernels"], answer["seconds"])
    if answer["errors"]:
        first, count = answer["errors"][0], len(answer["errors"])
        log.warning("could not compile %d kernels ahead; the first error: %s", count, first)


def _answer(task: bytes) -> dict[str, Any]:
    from ridgeline.ops.cuda.dependent_launch import ASSUMED_CAPABILITY, capability

    environment = {**os.environ, ASSUMED_CAPABILITY: str(capability() or 0), "CUDA_VISIBLE_DEVICES": ""}
    # The package that runs here, wherever it was imported from.
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    child = subprocess.Popen(
        PROGRAM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a process group that ends with it: Triton runs ptxas and a C compiler
    )

    def end() -> None:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    atexit.register(end)
    try:
        said, _ = child.communicate(task)
    finally:
        atexit.unregister(end)
    if child.returncode:
        raise RuntimeError(f"the compiling process exited with status {child.returncode}")
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    if "failure" in answer:
        raise RuntimeError(answer["failure"])
    return answer


def main() -> None:
    """The child process: reads its task from standard input; the last line of its output is the answer."""
    os.nice(NICENESS)
    parent, dry_run, decode_sizes = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        answer = _compile(dry_run, decode_sizes)
    except Exception as error:
        answer = {"failure": _in_a_line(error)}
    print(json.dumps(answer), flush=True)


def _compile(arguments: dict[str, Any], decode_sizes: list[int]) -> dict[str, Any]:
    from ridgeline.engine.run.cuda import warm as cuda_warm
    from ridgeline.ops.cuda.attention import prefill_specialized
    from ridgeline.ops.cuda.dependent_launch import capability
    from ridgeline.ops.cuda.recording import compile_all, compile_for

    started = time.monotonic()
    compile_for(capability() or 0)
    # The number affects grids, never kernels; querying it would open the GPU.
    prefill_specialized._multiprocessors = lambda device: 1  # type: ignore[assignment]
    launches = cuda_warm.other_kernels(cuda_warm.StepDryRun(**arguments), decode_sizes)
    errors = compile_all(launches, threads=max(2, min(8, (os.cpu_count() or 1) // 2)))
    return {
        "kernels": len(launches) - len(errors),
        "seconds": time.monotonic() - started,
        "errors": [_in_a_line(error) for error in errors],
    }


def _end_with(parent: int) -> None:
    """End this process and the compilers it runs when its parent has exited. Polled: a parent-death signal
    would fire when the parent's thread that started this process exits."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    main()
