"""Forked: runs work on untrusted input in a child process, which it may crash without harming others.

`trial` compiles grammars, `conformance` checks answers. Each has a separate process that forks a child for
every task (`serve_forked`), and a `ForkedWorker` in the calling process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# For one task, on an overloaded machine: beside processes that are not nice it gets a tenth of a core.
WALL_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 1 << 30  # on top of the process's own memory
START_LIMIT_S = 60.0
NICENESS = 10
TOO_LONG, NO_TIME, TOO_LARGE = "too long", "no time", "too large"  # why a child gave no answer


class ForkedWorker:
    """The calling side: one process, started with the first task and restarted if it exits."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._lock = threading.Lock()

    def ask(self, question: Any) -> Any:
        """The answer; None if a second process does not answer either."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            for _ in range(2):
                answer = self._ask(line)
                if answer is not None:
                    return answer
                self._end()
        return None

    def close(self) -> None:
        with self._lock:
            self._end()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it is not running; it accepts tasks before its imports are complete."""
        if self._process is None:
            self._has_answered = False
            self._process = self._started()
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, line: bytes) -> Any:
        timeout_s = WALL_LIMIT_S + 2.0 + (0.0 if self._has_answered else START_LIMIT_S)
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                return None
            answer = process.stdout.readline()
        except OSError:
            return None
        if not answer:
            return None
        self._has_answered = True
        return json.loads(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        # The package that runs here, wherever it was imported from.
        paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # the server handles Ctrl-C in the terminal
        )


def serve_forked(work: Callable[[Any], Any], cpu_limit_s: float, died: Callable[[str], Any]) -> None:
    """Answer the tasks on standard input until it ends. died: makes the answer for a child without one."""
    os.nice(NICENESS)  # only now: the first task waits for everything before this line
    for line in sys.stdin.buffer:
        answer = _answer_of_child(work, json.loads(line), cpu_limit_s, died)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer_of_child(
    work: Callable[[Any], Any], question: Any, cpu_limit_s: float, died: Callable[[str], Any]
) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(work, question, cpu_limit_s, writing)
    os.close(writing)
    said = b""
    deadline = time.monotonic() + WALL_LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 65536)
        if not part:
            break
        said += part
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said.endswith(b"\n"):
        return json.loads(said)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    reasons = {int(signal.SIGPROF): TOO_LONG, int(signal.SIGKILL): NO_TIME}
    return died(reasons.get(ended_by, TOO_LARGE))


def _be_the_child(work: Callable[[Any], Any], question: Any, cpu_limit_s: float, writing: int) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_LIMIT_BYTES,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        os.write(writing, json.dumps(work(question)).encode() + b"\n")
    finally:
        os._exit(0)
