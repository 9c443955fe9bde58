"""SweepOptions: the command-line options of a sweep, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class SweepOptions:
    over: Literal["rate", "concurrency"] = option(
        "rate", "increase the arrivals per second (open loop) or the requests in flight (closed loop)"
    )
    start: float = option(
        1.0, "start at this load; double it until it is too much, or halve it until it is not"
    )
    most: float = option(1024.0, "measure no load above this")
    values: str | None = option(None, "measure exactly these loads: 1,2,4,8; default: search for the knee")
    precision: float = option(0.1, "stop when the loads around the knee differ by this share")
    point_s: float = option(30.0, "send traffic for this many seconds at each load")
    budget_s: float | None = option(
        None, "start no load that would end after this many seconds of the whole sweep; default: no limit"
    )
