"""The utilisation signal: how full the replicas are, in tokens, KV memory and slots, over the window.

A replica's use is the larger of two shares: KV tokens held and prompt tokens queued, of its KV memory; and
requests running and waiting, of its slots. Work is counted in replicas, so the result does not depend on
their number.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from ridgeline.fleet.scaling.explain import Signal
from ridgeline.fleet.scaling.inputs import Inputs, ReplicaSample


class Use(NamedTuple):
    """running: work that replicas do now. backlog: work that waits, at replicas and at routers."""

    running: float
    backlog: float
    stale: int
    serving: int


def is_stale(replica: ReplicaSample, now: float, stale_s: float) -> bool:
    return replica.heard_at is None or now - replica.heard_at > stale_s


def use_of(replica: ReplicaSample) -> tuple[float, float]:
    """(running, backlog) of one replica, in replicas."""
    slots = kv = slots_waiting = kv_waiting = 0.0
    if replica.max_running:
        slots, slots_waiting = replica.running / replica.max_running, replica.waiting / replica.max_running
    if replica.kv_tokens:
        kv, kv_waiting = (
            replica.kv_tokens_held / replica.kv_tokens,
            replica.queued_tokens / replica.kv_tokens,
        )
    total = max(slots + slots_waiting, kv + kv_waiting)
    running = min(max(slots, kv), total)
    return running, total - running


def measure_use(inputs: Inputs, now: float, stale_s: float, target: float) -> Use:
    """A replica with a stale report counts as used to the target: it justifies itself and no other."""
    running = backlog = 0.0
    stale = serving = slots = 0
    for replica in inputs.replicas:
        if not replica.serves:
            continue
        serving += 1
        slots = max(slots, replica.max_running)
        if is_stale(replica, now, stale_s):
            stale += 1
            running += target
        else:
            does, waits = use_of(replica)
            running += does
            backlog += waits
    if inputs.demand.held:
        # As long as no replica has reported its slots, held requests count as one replica.
        backlog += inputs.demand.held / slots if slots else 1.0
    return Use(running, backlog, stale, serving)


class UseWindow:
    """The use in the last `window_s`; each sample is weighted by the time for which it held."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, Use]] = deque()

    def hear(self, use: Use, now: float) -> None:
        if self._samples and now <= self._samples[-1][0]:
            self._samples.pop()
        self._samples.append((now, use))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    def mean(self) -> tuple[float, float]:
        """(running, backlog). A sample stands for the time since the previous one."""
        samples = self._samples
        if len(samples) == 1:
            return samples[0][1].running, samples[0][1].backlog
        end = samples[-1][0]
        start = max(samples[0][0], end - self._window_s)
        running = backlog = 0.0
        for at in range(1, len(samples)):
            seconds = samples[at][0] - max(samples[at - 1][0], start)
            running += samples[at][1].running * seconds
            backlog += samples[at][1].backlog * seconds
        return running / (end - start), backlog / (end - start)


def utilisation_signal(window: UseWindow, use: Use, target: float, counts_backlog: bool, most: int) -> Signal:
    """counts_backlog is False while replicas start: the backlog may keep `most` replicas but add none."""
    running, backlog = window.mean()
    full = math.ceil((running + backlog) / target - 1e-9)
    desired = full if counts_backlog else max(min(full, most), math.ceil(running / target - 1e-9))
    facts = {
        "running": running,
        "backlog": backlog,
        "running_now": use.running,
        "backlog_now": use.backlog,
        "serving": float(use.serving),
    }
    why = f"{running:.2f} replicas' worth runs and {backlog:.2f} waits"
    return Signal("utilisation", running + backlog, desired, facts, why)
