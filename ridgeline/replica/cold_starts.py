"""Recorded cold starts: one line of JSON for each start of a replica, kept by the fleet, read by the planner.

The file is in the fleet's state directory. It has at most twice KEPT lines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.options import OptionError
from ridgeline.replica.messages import WeightsFrom
from ridgeline.running import state_home

FILE = "cold-starts.jsonl"
KEPT = 200


class ColdStart(msgspec.Struct, frozen=True):
    """segments: seconds of each part, in order; `total` is the whole."""

    at: float  # seconds since 1970, when it was ready
    source: str  # MODEL of `ridgeline serve`
    hardware: str
    substrate: str
    segments: dict[str, float]
    weights: WeightsFrom | None = None
    weight_bytes: int = 0


def add_start(state_dir: Path, start: ColdStart) -> None:
    """OSError where the disk is full."""
    path = state_dir / FILE
    with path.open("ab") as file:
        file.write(msgspec.json.encode(start) + b"\n")
        is_long = file.tell() > KEPT * 512
    if is_long and len(lines := path.read_bytes().splitlines(keepends=True)) > 2 * KEPT:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(lines[-KEPT:]))
        temporary.replace(path)


def read_starts(state_dir: Path | None = None) -> Sequence[ColdStart]:
    """The oldest first; empty where none is recorded. A line that cannot be read is skipped."""
    try:
        data = ((state_home() / "fleet" if state_dir is None else state_dir) / FILE).read_bytes()
    except (OSError, OptionError):  # OptionError: no home directory
        return ()
    found = []
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=ColdStart))
        except msgspec.MsgspecError:
            continue
    return found
