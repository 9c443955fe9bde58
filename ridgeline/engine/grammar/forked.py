"""Forked: work on what strangers wrote, done by a child process that may die of it, and by no other.

`trial` compiles grammars, `conformance` checks answers. Each has a separate process that forks a child
for every question (`serve_questions`), and a `Questions` in the process that asks.
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

WALL_LIMIT_S = 5.0  # of one question, on a machine that has hardly a processor to spare
MEMORY_LIMIT_BYTES = 1 << 30  # beyond what the process has before
START_LIMIT_S = 60.0
NICENESS = 10
TOO_LONG, NO_TIME, TOO_LARGE = "too long", "no time", "too large"  # what became of a child without an answer


class Questions:
    """The asking end: one process, begun with the first question, and again should it be gone."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._lock = threading.Lock()

    def ask(self, question: Any) -> Any:
        """The answer; None where a second process does not answer either."""
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
        """The process, begun if there is none; it takes questions before it has imported all it needs."""
        if self._process is None:
            self._has_answered = False
            self._process = self._begun()
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, line: bytes) -> Any:
        patience_s = WALL_LIMIT_S + 2.0 + (0.0 if self._has_answered else START_LIMIT_S)
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], patience_s)[0]:
                return None
            answer = process.stdout.readline()
        except OSError:
            return None
        if not answer:
            return None
        self._has_answered = True
        return json.loads(answer)

    def _begun(self) -> subprocess.Popen[bytes]:
        # The very package that runs here, wherever it was imported from.
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
            start_new_session=True,  # Ctrl-C in the terminal is handled by the front
        )


def serve_questions(work: Callable[[Any], Any], cpu_limit_s: float, died: Callable[[str], Any]) -> None:
    """Answer the questions on standard input until it ends. died: the answer for a child without one."""
    os.nice(NICENESS)  # from here on: the first question waits for all before
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
