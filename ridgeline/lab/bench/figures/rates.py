"""How much of a request counts for a rate over a window. Called by `metrics`, `ceilings`, `compare_rates`.

Closed loops end requests in waves, and both edges of their steady window are ends of requests, so counting
ends would count up to one wave too many. There a request counts by the share of its time inside the window,
which is exact for any phase of the waves. An open loop's edges are not ends, and under overload a request's
time is mostly queueing: there the end itself is counted.
"""

from __future__ import annotations

from typing import Literal

from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.window import Window

Mode = Literal["closed", "open"]


def request_share(record: RequestRecord, window: Window, mode: Mode) -> float:
    """The part of an answer that counts for a window, 0 to 1."""
    if mode == "open":
        return float(window.holds(record.t_end))
    return _time_share(record, window)


def prompt_share(record: RequestRecord, window: Window, mode: Mode) -> float:
    """The part of its prompt that counts for a window, 0 to 1."""
    if mode == "open":
        return float(window.holds(record.t_first))
    return _time_share(record, window)


def _time_share(record: RequestRecord, window: Window) -> float:
    if record.t_send is None or record.t_end is None:
        return 0.0
    return window.overlap(record.t_send, record.t_end)
