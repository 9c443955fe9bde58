"""SweepOptions: the command-line options of a sweep, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class SweepOptions:
    over: Literal["rate", "concurrency"] = option(
        "rate", "what to vary: arrivals per second (open loop) or requests in flight (closed loop)"
    )
    start: float = option(
        1.0, "the first load; it is doubled until it is too high, or halved until it is not"
    )
    most: float = option(1024.0, "maximum load")
    values: str | None = option(None, "exactly these loads, as 1,2,4,8; default: search for the knee")
    precision: float = option(0.1, "stop when the loads around the knee differ by this share")
    point_s: float = option(30.0, "seconds of traffic at each load")
    budget_s: float | None = option(
        None, "maximum seconds of the whole sweep; a load that would exceed it is not started"
    )
