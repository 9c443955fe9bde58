"""Parses a file in a process of its own, with limits on time, memory and output.

A file that hangs, crashes or fills the memory of its parser ends that process, and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.retrieval.parsing.errors import InvalidFile, ParseError, UnsupportedFile

WORKER = Path(__file__).with_name("worker.py")
_FAILED = {3: InvalidFile, 4: UnsupportedFile}  # exit codes of the worker; its message is on stderr
_LONGEST_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class Limits:
    """What one file may take."""

    cpu_s: int = 60
    wall_s: float = 120.0
    memory_bytes: int = 1 << 30
    text_bytes: int = 64 << 20


DEFAULT_LIMITS = Limits()


def parsed_apart(path: Path, kind: Literal["html", "pdf"], limits: Limits) -> str:
    command = [sys.executable, "-I", str(WORKER), kind, str(path)]
    settings = [str(limits.cpu_s), str(limits.memory_bytes), str(limits.text_bytes)]
    try:
        ended = subprocess.run(
            [*command, *settings],
            capture_output=True,
            timeout=limits.wall_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise InvalidFile(
            f"the file was not read after {limits.wall_s:g} s, the limit for one file"
        ) from None
    if ended.returncode == 0:
        return ended.stdout.decode("utf-8")
    raise _failure(ended.returncode, ended.stderr.decode("utf-8", "replace"), limits)


def _failure(code: int, said: str, limits: Limits) -> ParseError:
    if code in _FAILED:
        return _FAILED[code](said.strip()[:_LONGEST_MESSAGE])
    if code < 0:
        return InvalidFile(
            f"the file ended its parser (signal {-code}): it is damaged, or needs more than "
            f"{limits.cpu_s} s of CPU or {limits.memory_bytes >> 20} MiB of memory"
        )
    return InvalidFile(f"the file cannot be read: {said.strip().rpartition(chr(10))[2][:_LONGEST_MESSAGE]}")
