"""SimulatedEngine: the engine's scheduler and KV pool with a device that takes the predicted time for a step.

The loops around it (`simulate` for one replica, `simulate.fleet` for many) add requests and move it on, one
iteration at a time or over a run of decode-only steps. It follows `engine_loop` and `core` of the engine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import RowResult, SeqDelta, StepPlan, StepResult, StepWork
from ridgeline.lab.perfmodel.step_times import StepTimes, quantile
from ridgeline.lab.simulate.fast_forward import FastForwardScheduler
from ridgeline.lab.simulate.run import Extent, KvUse
from ridgeline.lab.simulate.speculation import DraftFigures, LikelyDrafter, drawn
from ridgeline.telemetry.stats import StepRecord

NOTHING = RowResult()
SHORTEST_RUN = 2  # iterations; a single one is as fast without


@dataclass(slots=True)
class _Flight:
    """A step in flight. `ends`: when the device is done with it."""

    plan: StepPlan
    work: StepWork
    started: float
    launched: float
    ends: float


class SimulatedEngine:
    """publish: called with what a step has given each sequence, at `now`.

    noise:        draws each step's time from the residuals of the fit; None: the expected time
    step_records: each step as the engine records it; None: not kept
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        times: StepTimes,
        lookahead: int,
        seed: int,
        publish: Callable[[list[SeqDelta]], None],
        drafts: DraftFigures | None = None,
    ) -> None:
        self.scheduler = FastForwardScheduler(limits, rng=random.Random(seed), lookahead=lookahead)
        self._times, self._host = times, times.host
        self._publish = publish
        self._flights: deque[_Flight] = deque()
        self._drafter = None if drafts is None else LikelyDrafter(drafts, seed)
        self.speculation = None if self._drafter is None else self._drafter.speculation(lambda: self.now)
        self._device_free = 0.0  # when the newest step in flight ends
        self.extent = Extent(times)
        self._lines: dict[int, tuple[float, float]] = {}
        self.now = 0.0
        self.busy_s = 0.0
        self._held_s = self._held_peak = 0.0  # KV blocks held: integral over busy time, and maximum
        self.noise: random.Random | None = None
        self.step_records: list[StepRecord] | None = None

    @property
    def kv_use(self) -> KvUse:
        total = self.scheduler.pool.num_blocks
        return KvUse(
            mean=self._held_s / self.busy_s / total if self.busy_s else 0.0, peak=self._held_peak / total
        )

    def iterate(self) -> None:
        """One iteration of the engine's loop: plan, launch, and read the oldest step when it is due."""
        speculation = self.speculation
        if speculation is not None and self._flights and speculation.pays_to_wait(self._flights[-1].plan):
            while self._flights:
                self._collect(self._flights.popleft())
            if not self.scheduler.has_work:
                return
        started = self.now
        plan = self.scheduler.schedule(started)
        if plan:
            drafting_s = self._extend(plan)
            work = plan.work
            launched = started + self._host.schedule(len(plan.rows))
            seconds = self._times.seconds(work) * self._factor(work) + drafting_s
            self._compute(work, seconds)
            self._device_free = max(self._device_free, launched) + seconds
            self._flights.append(_Flight(plan, work, started, launched, self._device_free))
            self.now = launched
        elif not self._flights:
            raise RuntimeError("the scheduler has work but planned none")
        if not plan or len(self._flights) > self.scheduler.lookahead:
            self._collect(self._flights.popleft())

    def _extend(self, plan: StepPlan) -> float:
        """Add guesses to the plan, as the engine does. Returns the time of drafting."""
        if self.speculation is None or self._drafter is None:
            return 0.0
        before_s = self._drafter.spent_s
        self.speculation.extend(plan, self.scheduler)
        return self._drafter.spent_s - before_s

    def _collect(self, flight: _Flight) -> None:
        last_end = self.scheduler.counters.last_step_end
        self.now = max(self.now, flight.ends)
        result = StepResult([RowResult(drawn(row)) if row.samplers else NOTHING for row in flight.plan.rows])
        deltas = self.scheduler.apply(result, self.now)
        if self.speculation is not None:
            self.speculation.landed(flight.plan, result, self.now - max(flight.started, last_end))
        if self.step_records is not None:
            wall, planning = self.now - flight.launched, flight.launched - flight.started
            busy = self.now - max(flight.launched, last_end)
            self.step_records.append(
                StepRecord(flight.plan.step_id, flight.started, *flight.work, wall, planning, busy)
            )
        self._publish(deltas)
        self.now += self._host.turn(len(flight.plan.rows))

    def fast_forward(self, until: float) -> bool:
        """Take the upcoming decode-only iterations that begin before `until`. False: there are none."""
        run = None if self.speculation is not None else self.scheduler.decode_run()
        if run is None or run.iterations < SHORTEST_RUN:
            return False
        batch = len(run.sequences)
        if batch not in self._lines:
            self._lines[batch] = self._times.decode_line(batch)
        base, per_context = self._lines[batch]
        planning, turning = self._host.schedule(batch), self._host.turn(batch)
        now, free, context = self.now, self._device_free, run.context
        in_flight = deque(flight.ends for flight in self._flights)
        applied: list[float] = []
        started = total = seconds = 0.0
        work = StepWork(decode_batch=batch, decode_context=context)
        for _ in range(run.iterations):
            if until <= now:
                break
            started = now
            now = launched = started + planning
            seconds = base + per_context * context
            if self.noise is not None:
                seconds *= self._factor(work)
            total += seconds
            free = max(free, launched) + seconds
            in_flight.append(free)
            now = max(now, in_flight.popleft())
            applied.append(now)
            now += turning
            context += batch
        self._compute(work._replace(decode_context=context - batch), total)
        self.scheduler.take_run(run, started, applied, _token_of)
        self._held_peak = max(self._held_peak, self.scheduler.pool.num_held)
        self._move_flights(len(applied), batch, in_flight)
        self.now, self._device_free = now, free
        return True

    def _move_flights(self, iterations: int, batch: int, ends: deque[float]) -> None:
        """Replace the steps in flight by those of the new position; the scheduler has moved their plans."""
        for flight, end in zip(self._flights, ends, strict=True):
            context = flight.work.decode_context + iterations * batch
            flight.work = StepWork(decode_batch=batch, decode_context=context)
            flight.ends = end

    def _factor(self, work: StepWork) -> float:
        if self.noise is None:
            return 1.0
        terms = self._times.mixed if work.prefill_tokens else self._times.decode
        return quantile(terms.ratios, self.noise.random())

    def _compute(self, work: StepWork, seconds: float) -> None:
        held = self.scheduler.pool.num_held
        self.busy_s += seconds
        self._held_s += held * seconds
        self._held_peak = max(self._held_peak, held)
        self.extent.add(work, seconds)


def _token_of(seq: Sequence) -> int:
    return seq.seed
