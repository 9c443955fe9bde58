"""SweepOptions: a sweep as the command line describes it, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import option


@dataclass(frozen=True, slots=True)
class SweepOptions:
    over: Literal["rate", "concurrency"] = option(
        "rate", "what grows: arrivals per second (open loop), or requests under way (closed loop)"
    )
    start: float = option(
        1.0, "the first load; it is doubled until it is too much, or halved until it is not"
    )
    most: float = option(1024.0, "no load above this")
    values: str | None = option(None, "exactly these loads, as 1,2,4,8; default: search for the knee")
    precision: float = option(0.1, "the knee is known when the loads around it differ by this share")
    point_s: float = option(30.0, "seconds of traffic at each load")
    budget_s: float | None = option(
        None, "seconds of the whole sweep: no load is begun that would not end in them"
    )
