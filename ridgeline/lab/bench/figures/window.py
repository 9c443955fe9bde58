"""The steady window of a run and the concurrency in it. Pure functions over records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from ridgeline.lab.bench.figures.record import RequestRecord

LEAST_SHARE = (
    1 / 3
)  # the steady part must be this share of the run and as long as an answer, else the whole run is used


class Window(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds from the start of the run, over which rates are computed."""

    start: float
    end: float
    note: str = ""  # where it is not a steady one

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, moment: float | None) -> bool:
        return moment is not None and self.start <= moment <= self.end

    def overlap(self, start: float, end: float) -> float:
        """The share of a span inside the window, 0 to 1."""
        if end <= start:
            return float(self.holds(start))
        return max(0.0, min(end, self.end) - max(start, self.start)) / (end - start)


def steady_window(offered: Sequence[RequestRecord]) -> Window:
    """From one median E2E after the first request was due (the server has filled) to the time the last one
    was due (it begins to empty). Runs too short for that are used whole.
    """
    ended = [record for record in offered if record.t_end is not None]
    if not ended:
        return Window(0.0, 0.0, "nothing ended")
    first = min(record.t_sched for record in offered)
    last_due = max(record.t_sched for record in offered)
    last_end = max(record.t_end or 0.0 for record in ended)
    ok = [record for record in ended if record.status == "ok"] or ended
    each = statistics.median((record.t_end or 0.0) - record.t_sched for record in ok)
    filled = first + each
    if last_due - filled < max(LEAST_SHARE * (last_end - first), each):
        return Window(first, last_end, "too short to be steady: the whole run, its start and end included")
    return Window(filled, last_due)


def concurrency(records: Sequence[RequestRecord], window: Window) -> tuple[float, int]:
    """Requests in flight: mean over the window, and peak of the whole run."""
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.t_send is not None and record.t_end is not None:
            changes += [(record.t_send, 1), (record.t_end, -1)]
    changes.sort()  # at equal times the end comes first: a reused slot counts as one request
    level = peak = 0
    area, since = 0.0, window.start
    for moment, change in changes:
        until = min(max(moment, window.start), window.end)
        area += level * (until - since)
        since = until
        level += change
        peak = max(peak, level)
    return (area / window.seconds if window.seconds > 0 else 0.0), peak
