"""Processes that carry a replica's mark: what must be gone after each test."""

from __future__ import annotations

import time
from pathlib import Path

from ridgeline.fleet.substrates.substrate import MARK
from tests.patience import PATIENCE_S


def marked(fleet: str) -> list[int]:
    """Living processes of a fleet's replicas on this machine, guards and engines included."""
    wanted, found = f"{MARK}={fleet}/".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            if any(one.startswith(wanted) for one in (folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def none_left(fleet: str) -> bool:
    """Whether they are all gone within the time that a test waits."""
    deadline = time.monotonic() + PATIENCE_S
    while marked(fleet) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not marked(fleet)
