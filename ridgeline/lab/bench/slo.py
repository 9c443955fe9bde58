"""Slo: what an answer must keep to be good, read off `ttft=400,tpot=50`. Judged by `metrics`."""

from __future__ import annotations

import msgspec

from ridgeline.lab.errors import BadInput

NAMES = ("ttft", "tpot", "e2e", "ttfo", "itl")


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Upper limits in milliseconds; None: not asked for.

    itl is judged by the largest gap per token of an answer; the others by the metric of their name. In open
    loops ttft, ttfo and e2e count from the planned moment.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    ttfo_ms: float | None = None
    itl_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=400,tpot=50`: milliseconds, each name once."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            name = name.strip().removesuffix("_ms")
            if name not in NAMES:
                raise BadInput(
                    f"slo: {part.strip()!r} is none of {', '.join(NAMES)} (as in ttft=400,tpot=50)"
                )
            if f"{name}_ms" in limits:
                raise BadInput(f"slo: {name} is given twice")
            try:
                limits[f"{name}_ms"] = float(number)
            except ValueError:
                raise BadInput(f"slo: {name} needs a number of milliseconds, got {number!r}") from None
            if not 0 < limits[f"{name}_ms"] < float("inf"):
                raise BadInput(f"slo: {name} must be above 0 ms, got {number}")
        return cls(**limits)

    @property
    def text(self) -> str:
        limits = ((name, getattr(self, f"{name}_ms")) for name in NAMES)
        return ",".join(f"{name}={limit:g}" for name, limit in limits if limit is not None)
