"""How much of the machine others took during a measurement, and waiting until they take little.

Used by the comparisons: on two shared cores a colleague's compiler halves a figure, and engines whose threads
spin at barriers suffer most. A disturbed sample is repeated, not hidden: its share is in the report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_SHARE = 0.04  # of all cores; the client of a shell and the kernel's own threads stay below
DISTURBED_SHARE = 0.08


@dataclass(frozen=True)
class Sample(Generic[T]):
    value: T
    foreign_share: float  # of all cores' time, taken by processes that are not part of the benchmark
    attempts: int

    @property
    def is_disturbed(self) -> bool:
        return self.foreign_share >= DISTURBED_SHARE


def busy_seconds() -> float:
    """CPU seconds of the whole machine so far, stolen ones included."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def process_tree(root: int) -> list[int]:
    """The process and all its living descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(_stat_fields(int(entry))[1])
            except OSError:
                continue
    tree = [root]
    for pid in tree:  # grows while it is read: breadth first
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def own_seconds() -> float:
    """CPU seconds of this process and everything it has started, those already reaped included."""
    total = 0
    for pid in process_tree(os.getpid()):
        try:
            total += sum(int(x) for x in _stat_fields(pid)[11:15])  # utime, stime, cutime, cstime
        except OSError:
            continue
    return total / TICKS_PER_S


def _stat_fields(pid: int) -> list[str]:
    # The command in parentheses may hold spaces; what follows the last one does not.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Foreign:
    """The share of the machine that others take, since `Foreign()`."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def share(self) -> float:
        wall = time.monotonic() - self._wall
        foreign = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        return max(0.0, foreign) / (max(wall, 1e-9) * (os.cpu_count() or 1))


def wait_for_quiet(patience_s: float) -> bool:
    """Until others take less than QUIET_SHARE for half a second; False when patience ends first."""
    deadline = time.monotonic() + patience_s
    while True:
        watch = Foreign()
        time.sleep(0.5)
        if watch.share() < QUIET_SHARE:
            return True
        if time.monotonic() > deadline:
            return False


def measured(measure: Callable[[], T], patience_s: float, attempts: int) -> Sample[T]:
    """The least disturbed of at most `attempts` tries; the first undisturbed one ends them."""
    tries: list[Sample[T]] = []
    for attempt in range(1, attempts + 1):
        wait_for_quiet(patience_s)
        watch = Foreign()
        value = measure()
        tries.append(Sample(value, watch.share(), attempt))
        if not tries[-1].is_disturbed:
            break
    best = min(tries, key=lambda one: one.foreign_share)
    return Sample(best.value, best.foreign_share, len(tries))
