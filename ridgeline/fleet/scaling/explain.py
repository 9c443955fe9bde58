"""Decision and Explain: a decision of the autoscaler and its inputs, stored as an event."""

from __future__ import annotations

from typing import Literal

import msgspec

# The limits that kept the result from the number that the signals want.
Limit = Literal[
    "min",
    "max",
    "budget",
    "scale_up_delay",
    "scale_down_delay",
    "stale",
    "starting",  # a backlog adds no replica while others start
    "one_first",  # from zero to one, and to zero through one
    "work_left",  # not to zero while requests are held or run
]


class Signal(msgspec.Struct, frozen=True):
    """One signal, in replicas. desired is None if the signal has no data."""

    name: Literal["traffic", "utilisation"]
    load: float  # replicas needed if each is used in full
    desired: int | None  # replicas needed if each is used to the target
    facts: dict[str, float]
    why: str


class Explain(msgspec.Struct, frozen=True):
    before: int
    target: int
    wanted: int  # from the larger signal, before any limit
    won: Literal["traffic", "utilisation", "none"]
    traffic: Signal
    utilisation: Signal
    limits: tuple[Limit, ...]
    ready: int
    starting: int
    draining: int
    stale: int  # serving replicas without a recent load report
    oldest_start_s: float
    price_per_hour: float  # cost of the current replicas
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The same for equal decisions, whose figures may differ."""
        counts = f"{self.ready} ready, {self.starting} starting, {self.draining} draining, {self.stale} stale"
        return f"{self.before} to {self.target}, {self.won} {self.wanted}, {'+'.join(self.limits)}, {counts}"

    @property
    def sentence(self) -> str:
        """One line for `events` and `status`."""
        change = (
            f"keep {self.target}"
            if self.target == self.before
            else f"scale {'up' if self.target > self.before else 'down'} from {self.before} to {self.target}"
        )
        parts = [f"{change}: {self.won if self.won != 'none' else 'neither signal'} wants {self.wanted}"]
        parts += [f"{signal.name}: {signal.why}" for signal in (self.traffic, self.utilisation)]
        if self.limits:
            parts.append("limited by " + ", ".join(self.limits))
        if self.starting:
            parts.append(f"{self.starting} starting, the oldest for {self.oldest_start_s:.0f} s")
        return "; ".join(parts)


class Decision(msgspec.Struct, frozen=True):
    target: int
    explain: Explain

    @property
    def changed(self) -> bool:
        return self.target != self.explain.before
