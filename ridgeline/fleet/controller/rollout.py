"""Rollout: replaces replicas of the old version by replicas of the new one. A pure state machine.

The controller calls `step` with the state of the replicas; the result says how many to start and to drain,
and the weight of the new version. First one new replica, the canary, gets a small share of requests. If it
is judged good, the others follow within the surge and unavailable limits. Failed starts, more errors or a
longer time to first token turn the rollout back: the old version serves all the time. A canary that gets no
request is judged by generations that the controller asks of it: at once if the model has no traffic at all.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from ridgeline.fleet.config_models import RolloutConfig
from ridgeline.fleet.messages import ModelDemand, VersionOutcome

Phase = Literal["canary", "rolling", "rolling_back", "done", "rolled_back"]
MAX_SAMPLES = 2048  # times to first token, for each version
LEAST_SAMPLES = 10  # samples of each version before latencies are compared
FAILED_STARTS = 3  # failed starts of the new version in a row


class Outcomes:
    """How requests ended at one version, since the rollout began."""

    def __init__(self) -> None:
        self.ended = self.errors = 0
        self._ttft_ms: deque[float] = deque(maxlen=MAX_SAMPLES)

    def hear(self, outcome: VersionOutcome) -> None:
        self.ended += outcome.ended
        self.errors += outcome.errors
        self._ttft_ms.extend(outcome.ttft_ms)

    @property
    def error_rate(self) -> float:
        return self.errors / self.ended if self.ended else 0.0

    @property
    def p90_ms(self) -> float | None:
        """None if there are too few samples."""
        if len(self._ttft_ms) < LEAST_SAMPLES:
            return None
        ordered = sorted(self._ttft_ms)
        return ordered[int(0.9 * (len(ordered) - 1))]


class Counts(msgspec.Struct, frozen=True):
    """Replicas of one version."""

    starting: int = 0
    serving: int = 0  # ramping and ready
    failed_starts: int = 0  # in a row

    @property
    def alive(self) -> int:
        return self.starting + self.serving


class Step(msgspec.Struct, frozen=True):
    """What to do now. It may hold only the first of several changes: `step` is called again."""

    start_new: int = 0
    start_old: int = 0
    drain_new: int = 0
    drain_old: int = 0
    new_weight: float = 1.0
    note: str = ""  # text of an event: why the phase changed
    probe: bool = False  # no request reached the canary: ask it, and call `probed`


class Rollout:
    def __init__(
        self, old: str, new: str, config: RolloutConfig, now: float, phase: Phase = "canary"
    ) -> None:
        self.old, self.new, self.config = old, new, config
        self.phase: Phase = "rolling" if phase == "canary" and config.canary >= 1 else phase
        self.reason = ""
        self.outcomes = {old: Outcomes(), new: Outcomes()}
        self._began = now
        self._canary_since: float | None = None
        self._is_idle: bool | None = None  # no request since the canary serves; None: no report yet
        self._wants_probe = False
        self._probed: str | None = None  # empty: the canary generates; else why not

    @property
    def is_over(self) -> bool:
        return self.phase in ("done", "rolled_back")

    def hear_demand(self, demand: ModelDemand) -> None:
        """A router's report for an interval."""
        is_asked = bool(demand.arrived or demand.held or demand.in_flight)
        self._is_idle = not is_asked and self._is_idle is not False
        for outcome in demand.versions:
            self.hear(outcome)

    def hear(self, outcome: VersionOutcome) -> None:
        if outcome.version in self.outcomes:
            self.outcomes[outcome.version].hear(outcome)

    def probed(self, reason: str) -> None:
        """The result of the probe that a step asked for. reason: why it failed; empty: it did not."""
        self._probed = reason

    def awaited(self, now: float) -> str:
        """What the judgement of a canary that serves waits for; else empty."""
        if self.phase != "canary" or self._canary_since is None:
            return ""
        seen, watched_s, config = self.outcomes[self.new].ended, now - self._canary_since, self.config
        return (
            f"{seen} of {config.canary_requests} requests, {watched_s:.0f} of {config.canary_s:g} s; "
            "without traffic, a probe decides"
        )

    def missing(self, old: Counts, new: Counts, wanted: int) -> int:
        """How many replicas of the version that comes are to start now or later in this phase."""
        if self.phase == "rolling_back":
            return max(wanted - old.alive, 0)
        return max((min(1, wanted) if self.phase == "canary" else wanted) - new.alive, 0)

    def turn_back(self, reason: str) -> None:
        if not self.is_over:
            self.phase, self.reason = "rolling_back", reason

    def step(self, old: Counts, new: Counts, wanted: int, room: int, now: float) -> Step:
        """wanted: replicas of both versions. room: how many more the budget allows."""
        if self.is_over:
            return Step()
        before = self.phase
        self._wants_probe = False
        self._judge(old, new, wanted, now)
        step = (
            self._back(old, new, wanted, room)
            if self.phase == "rolling_back"
            else self._on(old, new, wanted, room)
        )
        note = ""
        if self.phase != before:
            note = f"rollout of {self.new}: {before} → {self.phase}" + (
                f": {self.reason}" if self.reason else ""
            )
        weight = self._weight(old, new)
        return msgspec.structs.replace(step, new_weight=weight, note=note, probe=self._wants_probe)

    # ---- judging ----

    def _judge(self, old: Counts, new: Counts, wanted: int, now: float) -> None:
        if self.phase == "rolling_back":
            return
        reason = self._failed_start(new, wanted, now) or self._verdict()
        if reason:
            self.turn_back(reason)
        elif self.phase == "canary":
            self._judge_canary(old, new, wanted, now)

    def _failed_start(self, new: Counts, wanted: int, now: float) -> str:
        if new.failed_starts >= FAILED_STARTS:
            return f"{new.failed_starts} replicas of the new version failed to start"
        late = now - self._began > self.config.start_s
        if late and wanted and new.serving == 0 and self._canary_since is None:
            return f"no replica of the new version was ready after {self.config.start_s:g} s"
        return ""

    def _judge_canary(self, old: Counts, new: Counts, wanted: int, now: float) -> None:
        if wanted == 0 or (old.serving == 0 and new.serving):
            self.phase, self.reason = "rolling", "no replica of the old version serves"
            return
        if new.serving and self._canary_since is None:
            self._canary_since, self._is_idle = now, None
        if self._canary_since is None:
            return
        watched_s, seen = now - self._canary_since, self.outcomes[self.new].ended
        if watched_s < self.config.canary_s:
            return
        if seen >= self.config.canary_requests:
            self.phase, self.reason = "rolling", f"the canary answered {seen} requests in {watched_s:.0f} s"
        elif watched_s >= self.config.judge_s or self._probed or (self._is_idle and not seen):
            self._judge_late(seen, watched_s, new)

    def _judge_late(self, seen: int, watched_s: float, new: Counts) -> None:
        """Fewer requests than wanted came: those decide, or a probe where there are none."""
        if self._probed:
            self.turn_back(f"no traffic to judge by, and the canary failed a probe: {self._probed}")
        elif seen:
            reason = self._worse_errors(least=1)
            if reason:
                self.turn_back(reason)
            else:
                self.phase = "rolling"
                self.reason = f"{seen} requests reached the canary in {watched_s:.0f} s"
        elif self._probed is None:
            self._wants_probe = new.serving > 0  # a canary that starts again is probed once it serves
        else:
            self.phase, self.reason = "rolling", "no traffic to judge by; the canary generated when probed"

    def _verdict(self) -> str:
        """Why the new version is worse, judged by its requests; empty if it is not."""
        old, new, config = self.outcomes[self.old], self.outcomes[self.new], self.config
        least = max(config.canary_requests, 1)
        if reason := self._worse_errors(least):
            return reason
        before, after = old.p90_ms, new.p90_ms
        if self.phase != "canary" or before is None or after is None or new.ended < least:
            return ""  # later, starts and stops of replicas slow both versions
        if after > config.latency_ratio * before:
            return (
                f"p90 time to first token {after:.0f} ms, {before:.0f} ms of the old version; "
                f"at most {config.latency_ratio:g} times as much is allowed"
            )
        return ""

    def _worse_errors(self, least: int) -> str:
        old, new, config = self.outcomes[self.old], self.outcomes[self.new], self.config
        if new.ended < least or new.error_rate <= old.error_rate + config.error_rate:
            return ""
        return (
            f"error rate {new.error_rate:.1%} ({new.errors} of {new.ended}), {old.error_rate:.1%} of the "
            f"old version; at most {config.error_rate:.1%} more is allowed"
        )

    # ---- moving ----

    def _on(self, old: Counts, new: Counts, wanted: int, room: int) -> Step:
        if old.alive == 0 and new.serving == new.alive == wanted:
            self.phase = "done"
            return Step()
        canary = self.phase == "canary"
        most, least = wanted + self.config.surge, max(wanted - self.config.unavailable, 0)
        total = old.alive + new.alive
        spare = max(old.serving + new.serving - least, 0)
        missing = min(1, wanted) - new.alive if canary else wanted - new.alive
        if missing > 0:
            start = min(missing, most - total, room)
            if start > 0:
                return Step(start_new=start)
            # No room: drain an old replica first, one that does not serve yet if there is any.
            return Step(drain_old=min(missing, old.starting or min(spare, old.serving)))
        if canary:
            if total > most:
                return Step(drain_old=min(total - most, old.alive))
            return Step(start_old=max(min(wanted - total, room), 0))
        if old.alive:
            return Step(drain_old=old.starting or min(spare, old.serving))
        return Step(drain_new=new.alive - wanted)

    def _back(self, old: Counts, new: Counts, wanted: int, room: int) -> Step:
        if new.alive == 0 and old.alive >= wanted:
            self.phase = "rolled_back"
            return Step()
        if new.starting:
            return Step(drain_new=new.starting)
        total = old.alive + new.alive
        start = max(min(wanted - old.alive, wanted + self.config.surge - total, room), 0)
        if start:
            return Step(start_old=start)
        # The new version serves until the old one can: it is worse, but it answers.
        spare = old.serving + new.serving - max(wanted - self.config.unavailable, 0)
        drain = min(max(spare, 0), new.serving)
        if not drain and old.serving >= wanted:
            drain = new.serving
        return Step(drain_new=drain)

    def _weight(self, old: Counts, new: Counts) -> float:
        """Of each replica of the new version; one of the old version has 1. The canary gets the share
        `canary` of all requests, and no more than an old replica: in a large fleet, a tenth of the requests
        would be several times its share."""
        if old.serving == 0:
            return 1.0
        if self.phase == "canary":
            share = self.config.canary
            return min(share * old.serving / ((1 - share) * max(new.serving, 1)), 1.0)
        return 1.0 if self.phase in ("rolling", "done") else min(self.config.canary, 0.01)
