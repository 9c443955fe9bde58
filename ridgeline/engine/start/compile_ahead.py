"""Compiles the kernels of larger steps in child processes while the engine serves.

Compiling holds the GIL too often to run in the engine's process. Children dry-run the steps (see
`run.cuda.warm`) and compile what they launch into Triton's disk cache, where the engine finds it. They open
no GPU: they are told the target architecture. They never outlive the engine.
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


class CompilingProcesses:
    """Child processes that compile a start's kernels into Triton's disk cache, a share each. They import what
    they need at once, and begin when `compile` tells them for what."""

    def __init__(self, count: int | None = None) -> None:
        self.urgent_done = threading.Event()  # also set if it cannot be done
        self._error: Exception | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(count or default_count()):
                self._children.append(_start())
        except Exception as error:
            self._error = error
        atexit.register(self.end)

    def compile(self, dry_run: dict[str, Any], decode_sizes: list[int]) -> bool:
        """Compile what a `StepDryRun` with these arguments launches; returns when all have ended, True if
        nothing is missing. Errors are only logged: the engine compiles what is missing from the cache."""
        try:
            answers = self._answers(dry_run, decode_sizes)
        except Exception as error:
            log.warning("could not compile kernels ahead: %s", _in_a_line(error))
            return False
        finally:
            self.urgent_done.set()
            self.end()
            atexit.unregister(self.end)
        kernels, seconds = sum(each["kernels"] for each in answers), max(each["seconds"] for each in answers)
        log.info("%d kernels compiled ahead in %.1f s", kernels, seconds)
        errors = [error for each in answers for error in each["errors"]]
        if errors:
            log.warning("could not compile %d kernels ahead; the first error: %s", len(errors), errors[0])
        return not errors

    def _answers(self, dry_run: dict[str, Any], decode_sizes: list[int]) -> list[dict[str, Any]]:
        if self._error is not None:
            raise self._error
        shares = len(self._children)
        for share, child in enumerate(self._children):
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its status tells why
                child.stdin.write(pickle.dumps((os.getpid(), dry_run, decode_sizes, share, shares)))
                child.stdin.close()
        first_lines = [_line(child) for child in self._children]  # each once its urgent kernels are there
        self.urgent_done.set()
        return [_answer(child, line) for child, line in zip(self._children, first_lines, strict=True)]

    def end(self) -> None:
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if child.stdout is not None:
                child.stdout.close()


def default_count() -> int:
    """Of processes: on many cores several, since one compiles hardly more than two kernels at a time."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def _start() -> subprocess.Popen[bytes]:
    from ridgeline.ops.cuda.dependent_launch import ASSUMED_CAPABILITY, capability

    environment = {**os.environ, ASSUMED_CAPABILITY: str(capability() or 0), "CUDA_VISIBLE_DEVICES": ""}
    # The package that runs here, wherever it was imported from.
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.Popen(
        PROGRAM,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a process group that ends with it: Triton runs ptxas and a C compiler
    )


def _line(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


def _answer(child: subprocess.Popen[bytes], first_line: bytes) -> dict[str, Any]:
    """The last line that it wrote."""
    assert child.stdout is not None
    said = (first_line + child.stdout.read()).splitlines()
    if child.wait():
        raise RuntimeError(f"the compiling process exited with status {child.returncode}")
    if not said:
        raise RuntimeError("the compiling process ended without an answer")
    answer: dict[str, Any] = json.loads(said[-1])
    if "failure" in answer:
        raise RuntimeError(answer["failure"])
    return answer


def main() -> None:
    """The child process: reads its task from standard input. Its first line of output says that the urgent
    kernels of its share are there, the last is its answer."""
    os.nice(NICENESS)
    with contextlib.suppress(Exception):  # the task finds out
        from ridgeline.engine.run.cuda import warm as cuda_warm  # noqa: F401
    parent, dry_run, decode_sizes, share, shares = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        answer = _compile(dry_run, decode_sizes, share, shares)
    except Exception as error:
        answer = {"failure": _in_a_line(error)}
        print(flush=True)
    print(json.dumps(answer), flush=True)


def _compile(arguments: dict[str, Any], decode_sizes: list[int], share: int, shares: int) -> dict[str, Any]:
    from ridgeline.engine.run.cuda import warm as cuda_warm
    from ridgeline.ops.cuda.attention import prefill_specialized
    from ridgeline.ops.cuda.dependent_launch import capability
    from ridgeline.ops.cuda.recording import compile_all, compile_for

    started = time.monotonic()
    compile_for(capability() or 0)
    # The number affects grids, never kernels; querying it would open the GPU.
    prefill_specialized._multiprocessors = lambda device: 1  # type: ignore[assignment]
    dry_run = cuda_warm.StepDryRun(**arguments)
    # The engine compiles the first kernels itself meanwhile.
    known = {launch.variant for launch in cuda_warm.first_kernels(dry_run)}
    urgent = [each for each in cuda_warm.urgent_kernels(dry_run, decode_sizes) if each.variant not in known]
    urgent = urgent[share::shares]
    threads = max(2, min(8, (os.cpu_count() or 1) // (2 * shares)))
    errors = compile_all(urgent, threads)
    print(flush=True)
    everything = cuda_warm.other_kernels(dry_run, decode_sizes)
    known |= {launch.variant for launch in cuda_warm.urgent_kernels(dry_run, decode_sizes)}
    rest = [launch for launch in everything if launch.variant not in known][share::shares]
    errors += compile_all(rest, threads)
    return {
        "kernels": len(urgent) + len(rest) - len(errors),
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
