"""Autoscaler: decides every few seconds how many replicas of one model should run.

Two signals, traffic and utilisation; the larger wins. Then the limits: delays in each direction, minimum and
maximum, a hard budget. Starting replicas count as capacity. Without fresh metrics the number stays as it is.
`now` comes from a monotonic clock; a clock that goes back is ignored.
"""

from __future__ import annotations

import math
from collections import deque

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.scaling.explain import Decision, Explain, Limit, Signal
from ridgeline.fleet.scaling.inputs import Inputs
from ridgeline.fleet.scaling.traffic import Arrivals, Capacity, traffic_signal
from ridgeline.fleet.scaling.utilisation import Use, UseWindow, measure_use, utilisation_signal
from ridgeline.fleet.scaling.zero import LongRate, zero_warning

MAX_STALE_SHARE = 0.25  # with more serving replicas without fresh metrics, the number does not change


class Autoscaler:
    """One for each model. Its state: the window, the measured capacity, and the latest wanted numbers."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        self._arrivals = Arrivals(config.window_s)
        self._capacity = Capacity(config)
        self._use = UseWindow(config.window_s)
        self._wanted: deque[tuple[float, int]] = deque()  # (since, replicas), oldest first
        self._now = -math.inf
        self._long_rate = LongRate()

    def decide(self, inputs: Inputs, now: float) -> Decision:
        """The number of replicas from now on, and why."""
        now = self._now = max(now, self._now)
        config = self.config
        demand_is_fresh = inputs.demand.heard_at is not None and (
            now - inputs.demand.heard_at <= config.stale_s
        )
        if demand_is_fresh:
            self._arrivals.hear(inputs.demand, now)
            self._long_rate.hear(inputs.demand.arrived, now)
        self._capacity.hear(inputs.replicas)
        use = measure_use(inputs, now, config.stale_s, config.target)
        self._use.hear(use, now)
        starting = sum(replica.state == "starting" for replica in inputs.replicas)
        traffic = traffic_signal(self._arrivals, self._capacity, config.target, inputs.cold_start_s)
        utilisation = utilisation_signal(self._use, use, config.target, starting == 0, inputs.target)
        wanted, won = _larger(traffic, utilisation, inputs.target)
        limits: list[Limit] = []
        if starting and utilisation.load / config.target > (utilisation.desired or 0):
            limits.append("starting")
        if not demand_is_fresh or use.stale > MAX_STALE_SHARE * use.serving:
            target = inputs.target
            limits.append("stale")
            self._want(inputs.target, now)  # the delays begin again when metrics are back
        else:
            self._want(wanted, now)
            target = self._after_delays(inputs, wanted, now, limits)
        target = self._within_limits(inputs, target, limits)
        if target == 1 and inputs.target > 1 and "one_first" in limits:
            self._want_only(1, now)
        return Decision(target, self._explain(inputs, target, wanted, won, traffic, utilisation, limits, use))

    # ── delays ───────────────────────────────────────────────────────────────────────────────────────────

    def _want(self, replicas: int, now: float) -> None:
        if not self._wanted or self._wanted[-1][1] != replicas:
            self._wanted.append((now, replicas))
        longest = max(self.config.scale_up_delay_s, self.config.scale_down_delay_s)
        while len(self._wanted) > 1 and self._wanted[1][0] <= now - longest:
            self._wanted.popleft()

    def _want_only(self, replicas: int, now: float) -> None:
        self._wanted.clear()
        self._wanted.append((now, replicas))

    def _lately(self, seconds: float, now: float) -> list[int] | None:
        """The numbers wanted in the last `seconds`; None if there is no history for that time."""
        start = now - seconds
        if self._wanted[0][0] > start:
            return None
        since = [at for at, _ in self._wanted]
        first = max(index for index, at in enumerate(since) if at <= start)
        return [replicas for _, replicas in list(self._wanted)[first:]]

    def _after_delays(self, inputs: Inputs, wanted: int, now: float, limits: list[Limit]) -> int:
        before, config = inputs.target, self.config
        if before == 0:
            if wanted > 1:
                limits.append("one_first")
            return min(wanted, 1)  # no delay
        if wanted > before:
            lately = self._lately(config.scale_up_delay_s, now)
            reached = before if lately is None else max(before, min(lately))
            if reached < wanted:
                limits.append("scale_up_delay")
            return reached
        if wanted < before:
            lately = self._lately(config.scale_down_delay_s, now)
            reached = before if lately is None else min(before, max(lately))
            if reached > wanted:
                limits.append("scale_down_delay")
            return self._to_zero(inputs, reached, limits) if reached == 0 else reached
        return before

    def _to_zero(self, inputs: Inputs, reached: int, limits: list[Limit]) -> int:
        if inputs.demand.held or inputs.demand.in_flight or _running(inputs):
            limits.append("work_left")
            return 1
        if inputs.target > 1:
            limits.append("one_first")
            return 1
        return reached

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────

    def _within_limits(self, inputs: Inputs, target: int, limits: list[Limit]) -> int:
        config, before = self.config, inputs.target
        if target < config.min:
            target = config.min
            limits.append("min")
        if target > config.max:
            target = config.max
            limits.append("max")
        if config.budget is not None and inputs.price_per_hour > 0:
            most, most_growth = self._affordable(inputs, config.budget)
            allowed = min(target, most)
            if allowed > before:  # replicas that drain still cost
                allowed = max(before, min(allowed, most_growth))
            if allowed < target:
                target = max(allowed, 0)
                limits.append("budget")
        return target

    def _affordable(self, inputs: Inputs, budget: float) -> tuple[int, int]:
        """(replicas that the budget pays, the same while the draining ones still run)."""
        alive = [replica for replica in inputs.replicas if replica.is_capacity]
        draining = sum(replica.price_per_hour for replica in inputs.replicas if replica.state == "draining")
        left = budget - sum(replica.price_per_hour for replica in alive)
        most = len(alive) + math.floor(left / inputs.price_per_hour + 1e-9)
        return most, len(alive) + math.floor((left - draining) / inputs.price_per_hour + 1e-9)

    # ── why ──────────────────────────────────────────────────────────────────────────────────────────────

    def _explain(
        self,
        inputs: Inputs,
        target: int,
        wanted: int,
        won: str,
        traffic: Signal,
        utilisation: Signal,
        limits: list[Limit],
        use: Use,
    ) -> Explain:
        states = [replica.state for replica in inputs.replicas]
        starts = [self._now - replica.since for replica in inputs.replicas if replica.state == "starting"]
        warning = zero_warning(self.config, self._long_rate.requests_per_s, inputs.cold_start_s)
        return Explain(
            before=inputs.target,
            target=target,
            wanted=wanted,
            won="traffic" if won == "traffic" else "utilisation" if won == "utilisation" else "none",
            traffic=traffic,
            utilisation=utilisation,
            limits=tuple(dict.fromkeys(limits)),
            ready=states.count("ready") + states.count("ramping"),
            starting=states.count("starting"),
            draining=states.count("draining"),
            stale=use.stale,
            oldest_start_s=max(starts, default=0.0),
            price_per_hour=sum(
                replica.price_per_hour for replica in inputs.replicas if replica.state != "lost"
            ),
            warnings=(warning,) if warning else (),
        )


def _larger(traffic: Signal, utilisation: Signal, target: int) -> tuple[int, str]:
    known = [signal for signal in (traffic, utilisation) if signal.desired is not None]
    best = max(known, key=lambda signal: (signal.desired or 0, signal.name == "utilisation"), default=None)
    if best is None or best.desired is None:
        return target, "none"
    return best.desired, best.name if best.desired else "none"


def _running(inputs: Inputs) -> bool:
    return any(replica.serves and (replica.running or replica.waiting) for replica in inputs.replicas)
