"""Cold starts in a plan: the recorded starts of the same model on the same hardware, by segment.

A plan predicts a replica that serves; the time until it does is measured by the fleet, never guessed here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.lab.plan.plan_types import Plan
from ridgeline.models.files.hub import hub_id
from ridgeline.models.files.registry import find_known
from ridgeline.replica.cold_starts import ColdStart, read_starts


def starts_of(plan: Plan, read: Callable[[], Sequence[ColdStart]] = read_starts) -> list[ColdStart]:
    """Of the plan's model on its hardware, the oldest first."""
    chip, wanted = plan.request.chip, plan.request.name
    found = []
    for start in read():
        same = (
            chip.title.startswith(f"{start.hardware},")
            if chip.name == "cpu"
            else chip.name in start.hardware.lower()
        )
        if same and _name(start.source) == wanted:
            found.append(start)
    return found


def cold_start_rows(starts: Sequence[ColdStart]) -> list[list[str]]:
    """Segments with their median and range over the starts, in the order of the last one."""
    rows = [["segment", "median", "least", "most", "starts"]]
    names = [name for name in starts[-1].segments if name != "total"]
    names += [name for start in starts for name in start.segments if name not in (*names, "total")]
    for name in [*dict.fromkeys(names), "total"]:
        took = [start.segments[name] for start in starts if name in start.segments]
        if took and (max(took) >= 0.005 or name == "total"):
            spread = (statistics.median(took), min(took), max(took))
            rows.append([name, *(f"{seconds:.2f} s" for seconds in spread), str(len(took))])
    return rows


def cold_start_head(starts: Sequence[ColdStart]) -> str:
    last = starts[-1]
    day = time.strftime("%Y-%m-%d", time.gmtime(last.at))
    many = f"{len(starts)} recorded starts" if len(starts) > 1 else "one recorded start"
    return f"Cold start of a replica: {many} on {last.substrate}, the last on {day}"


def weights_note(starts: Sequence[ColdStart]) -> str:
    """Where the weights of the last start came from; empty where that is not known."""
    weights = starts[-1].weights
    if weights is None:
        return ""
    if not (weights.bytes and weights.seconds):
        return f"weights of the last start: {weights.source}"
    rate, limit = weights.bytes / weights.seconds / 1e6, weights.limit_bytes_per_s
    beside = f" of {limit / 1e6:.0f}" if limit else ""
    size = weights.bytes / 1e6
    return f"weights of the last start: {size:.0f} MB from {weights.source} at {rate:.0f}{beside} MB/s"


def _name(source: str) -> str:
    """As PlanRequest names its model."""
    if (on_hub := hub_id(source)) is not None:
        return on_hub.partition("@")[0]
    if (known := find_known(source)) is not None:
        return known.name
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.name
