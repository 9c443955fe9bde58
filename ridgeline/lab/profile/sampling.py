"""Samples a process's stacks by py-spy: where the host's time goes, without changing the program.

Works on any process of this machine that py-spy may read: a server's front, its engine, or this one. Used by
`run` and by `ridgeline profile --pid`. py-spy pauses the process for each sample, so shares are meaningful,
rates are not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.lab.errors import BadInput, LabError

RATE = 100  # samples a second
START_S = 60.0  # extra time for py-spy to read every library's symbols
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, -1

Stack = tuple[str, ...]  # outermost function first


@dataclass(frozen=True, slots=True)
class Samples:
    stacks: dict[Stack, int]

    @property
    def count(self) -> int:
        return sum(self.stacks.values())


@dataclass(frozen=True, slots=True)
class FunctionRow:
    """self: on top of the stack; total: anywhere in it. Both as shares of all samples."""

    name: str
    self_share: float
    total_share: float


class Recording:
    """py-spy running on a process; `finish` waits for it and returns the samples."""

    def __init__(self, pid: int, seconds: int, *, native: bool = False, rate: int = RATE) -> None:
        if not _is_alive(pid):
            raise BadInput(f"there is no process {pid}")
        self.pid = pid
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-profile-")
        self._out = Path(self._folder.name) / "stacks.txt"
        self._deadline_s = seconds + START_S
        command = [_program(), "record", "--pid", str(pid), "--duration", str(seconds), "--rate", str(rate)]
        command += ["--format", "raw", "--output", str(self._out), *(["--native"] if native else [])]
        # A file, not a pipe: it is read at the end, and a full pipe would block py-spy.
        self._log = (Path(self._folder.name) / "log.txt").open("wb+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> Samples:
        try:
            code = self._process.wait(self._deadline_s)
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            if code or not self._out.exists():
                raise LabError(refusal(self.pid, said))
            return read_stacks(self._out.read_text(encoding="utf-8", errors="replace"))
        except subprocess.TimeoutExpired:
            raise LabError(f"py-spy did not end within {self._deadline_s:.0f} s; it was stopped") from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop it if it still runs, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()


def refusal(pid: int, said: str) -> str:
    """py-spy's error as a line that says what to do."""
    if "permission denied" in said.lower() or "operation not permitted" in said.lower():
        return (
            f"py-spy may not read process {pid}: run this as its owner or as root; in a container give it "
            "--cap-add SYS_PTRACE; elsewhere `sysctl kernel.yama.ptrace_scope=0` allows it"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "reason"))] or lines[-1:]
    return f"py-spy could not sample process {pid}: {' '.join(errors) or 'it gave no reason'}"


def read_stacks(text: str) -> Samples:
    """py-spy's raw format: functions separated by semicolons, a space, the count of the stack."""
    stacks: Counter[Stack] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            stacks[tuple(stack.split(";"))] += int(count)
    return Samples(dict(stacks))


def top_functions(samples: Samples, most: int = 15) -> list[FunctionRow]:
    """Functions without line numbers, by time on top of the stack."""
    on_top: Counter[str] = Counter()
    anywhere: Counter[str] = Counter()
    for stack, count in samples.stacks.items():
        names = [_function(frame) for frame in stack]
        on_top[names[-1]] += count
        for name in set(names):
            anywhere[name] += count
    total = max(1, samples.count)
    return [
        FunctionRow(name, count / total, anywhere[name] / total) for name, count in on_top.most_common(most)
    ]


def speedscope(samples: Samples, name: str) -> dict[str, Any]:
    """The samples as a file for https://www.speedscope.app, which works in the browser."""
    frames: dict[str, int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in samples.stacks]
    weights = list(samples.stacks.values())
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": [
            {
                "type": "sampled",
                "name": name,
                "unit": "none",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": stacks,
                "weights": weights,
            }
        ],
    }


def allow_sampling() -> None:
    """Allow py-spy, a child of this process, to read it where Linux allows only parents (Yama)."""
    if sys.platform == "linux":
        # Fails if the kernel has no Yama; then nothing needs to be allowed.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(_ANYBODY), 0, 0, 0)


def family(pid: int) -> dict[int, str]:
    """A process and its descendants, each with its role; needs /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, new = {pid: _role(pid)}, [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new and child not in found]
        found |= {child: _role(child) for child in new}
    return found


def _role(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "process"
    if "ridgeline.engine" in command:
        return "engine"
    return "front" if " serve" in command else "process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # owned by another user: py-spy reports what is needed
    return True


def _program() -> str:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("py-spy", path=places)
    if found is None:
        raise LabError("py-spy is not installed: pip install 'ridgeline[lab]'")
    return found


def _function(frame: str) -> str:
    """`name (file.py:12)` without the line."""
    head, colon, line = frame.rpartition(":")
    return head + ")" if colon and line.rstrip(")").isdigit() else frame
