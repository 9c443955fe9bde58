"""Runs a program that a model wrote, confined: no network, few files, limits of every kind, a deadline.

Enforced by the kernel, without privileges (user namespaces): see `sandbox_child`. Where the system forbids
them, `refusal` says so and no program is run. Its last line is a matter of the program's own process: a
program that searches its process for the mark can claim to have reached it.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ridgeline.lab.errors import LabError

CHILD = Path(__file__).with_name("sandbox_child.py")
NOT_ENFORCED = 125  # of `sandbox_child`
MOST_OUTPUT = 65_536

ENFORCED = (
    "no network (own network namespace)",
    "no files but the interpreter and the system (/usr, /lib), read-only, and 16 MB in memory",
    "no sockets of other processes",
    "CPU time, memory, file size, open files and processes by rlimit",
    "every process of the program ends with it (own process namespace)",
)


class NotEnforced(LabError):
    """A part of the confinement failed: the program did not run, and is neither right nor wrong."""


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 32
    processes: int = 8
    wall_s: float = 20.0


class Ran(NamedTuple):
    """reason: why it did not pass, in a few words."""

    passed: bool
    reason: str = ""


def run_program(program: str, limits: Limits | None = None) -> Ran:
    """Passes only if the program reaches its end: an early exit(0) does not count. Raises NotEnforced."""
    limits = limits or Limits()
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="ridgeline-sandbox-") as folder, tempfile.TemporaryFile() as out:
        given = json.dumps({**asdict(limits), "folder": folder, "mark": mark})
        try:
            ended = subprocess.run(
                [_python(), "-I", "-S", str(CHILD), given],
                input=program.encode(),
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limits.wall_s,
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Ran(False, f"no end within {limits.wall_s:g} s")
        size = out.seek(0, 2)
        out.seek(max(0, size - MOST_OUTPUT))
        text = out.read().decode(errors="replace")
    if ended.returncode == 0 and text.rstrip().endswith(mark):
        return Ran(True)
    if ended.returncode == NOT_ENFORCED:
        raise NotEnforced(_last_line(text) or "not enforced")
    return Ran(False, _why(ended.returncode, text))


def refusal() -> str | None:
    """Why programs cannot be confined on this system; None if they can. Tried with a program."""
    if sys.platform != "linux":
        return f"programs are confined by Linux namespaces, and this is {sys.platform}"
    try:
        tried = run_program("pass")
        reason = tried.reason
        if tried.passed:
            return None
    except NotEnforced as error:
        reason = str(error)
    return (
        f"programs written by a model cannot be confined here ({reason}). Allow unprivileged user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
        "kernel.apparmor_restrict_unprivileged_userns=0, or a container with them), or leave humaneval out"
    )


def _python() -> str:
    """The base interpreter: the program gets no packages of the virtual environment."""
    base: str = getattr(sys, "_base_executable", "") or sys.executable
    return str(Path(base).resolve())


def _why(code: int, text: str) -> str:
    if code < 0 or code > 128:
        return f"ended by signal {-code if code < 0 else code - 128}"
    if code == 0:
        return "ended before its last line"
    return _last_line(text)[:200] or f"exit code {code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
