"""simulate(): the engine's scheduler, KV pool and prefix index under traffic, driven by a simulated clock.

The loop follows `engine_loop` and `core` of the engine: receive arrivals, plan, launch, read the oldest
step, publish. A step takes the time that `StepTimes` predicts; tokens are made up. Runs of decode-only steps
are taken at once (`fast_forward`), with the same result as one by one. Nothing here decides what is computed.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.plan.intake import SchedulerLimits
from ridgeline.engine.plan.request import Request, SamplingParams, Sequence
from ridgeline.engine.plan.step import RowResult, Sampled, SeqDelta, StepPlan, StepResult, StepWork
from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes, quantile
from ridgeline.lab.simulate.clients import Clients
from ridgeline.lab.simulate.fast_forward import FastForwardScheduler
from ridgeline.lab.simulate.prompts import TokenPrompts
from ridgeline.lab.simulate.run import Extent, KvUse, SimulatedRun
from ridgeline.lab.traffic.request import Traffic
from ridgeline.telemetry.stats import StepRecord

NOTHING = RowResult()
SHORTEST_RUN = 2  # iterations; a single one is as fast without


def simulate(
    traffic: Traffic,
    limits: SchedulerLimits,
    times: StepTimes,
    *,
    front: FrontTimes | None = None,
    concurrency: int | None = None,
    lookahead: int = 0,
    noise: bool = False,
    seed: int = 0,
    fast_forward: bool = True,
    keep_steps: bool = False,
) -> SimulatedRun:
    """concurrency:  requests or conversations in a closed loop at a time; None: sent at their planned times
    lookahead:    steps launched before the oldest is read, as in the engine's runner
    noise:        draw each step's time from the residuals of the fit; otherwise use the expected time
    fast_forward: False: take every step separately, to compare the two
    keep_steps:   record every step, as the engine does; costs time and memory
    """
    if concurrency is not None and concurrency < 1:
        raise BadInput(f"a closed loop needs a concurrency of at least 1, got {concurrency}")
    simulation = _Simulation(traffic, limits, times, front or FrontTimes(), concurrency, lookahead, seed)
    simulation.noise = random.Random(seed) if noise else None
    simulation.step_records = [] if keep_steps else None
    simulation.run(fast_forward and not keep_steps)
    return simulation.result()


@dataclass(slots=True)
class _Flight:
    """A step in flight. `ends`: when the device is done with it."""

    plan: StepPlan
    work: StepWork
    started: float
    launched: float
    ends: float


class _Simulation:
    def __init__(
        self,
        traffic: Traffic,
        limits: SchedulerLimits,
        times: StepTimes,
        front: FrontTimes,
        concurrency: int | None,
        lookahead: int,
        seed: int,
    ) -> None:
        self.scheduler = FastForwardScheduler(limits, rng=random.Random(seed), lookahead=lookahead)
        self._times, self._front, self._host = times, front, times.host
        self._clients = Clients(traffic, front, concurrency)
        self._prompts = TokenPrompts(traffic)
        self._traffic = traffic
        self._flights: deque[_Flight] = deque()
        self._device_free = 0.0  # when the newest step in flight ends
        self._extent = Extent(times)
        self._lines: dict[int, tuple[float, float]] = {}
        self.now = 0.0
        self.busy_s = 0.0
        self._held_s = self._held_peak = 0.0  # KV blocks held: integral over busy time, and maximum
        self.noise: random.Random | None = None
        self.step_records: list[StepRecord] | None = None

    def run(self, fast_forward: bool) -> None:
        clients, scheduler = self._clients, self.scheduler
        while True:
            while clients.due and clients.due[0][0] <= self.now:
                self._receive(heapq.heappop(clients.due)[1])
            if not scheduler.has_work:
                if not clients.due:
                    return
                self.now = clients.due[0][0]
            elif not (fast_forward and self._fast_forward()):
                self._iterate()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, index: int) -> None:
        planned = self._traffic.requests[index]
        token = self._prompts.answer_token(index)
        # The seed is what its made-up tokens are: see _token_of.
        params = SamplingParams(max_tokens=max(planned.output_tokens, 1), ignore_eos=True, seed=token)
        arrival = self._clients.sent[index]
        try:
            self.scheduler.add(Request(str(index), self._prompts.prompt(index), params, arrival=arrival))
        except (QueueFull, InvalidRequest) as error:
            status = 429 if isinstance(error, QueueFull) else 400
            self._clients.refused(index, self.now + self._front.first_s, status, str(error))

    def _publish(self, deltas: list[SeqDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                assert delta.timing is not None  # it comes with the end
                self._clients.answered(int(delta.request_id), delta.timing)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────

    def _iterate(self) -> None:
        """One iteration of the engine's loop: plan, launch, and read the oldest step when it is due."""
        started = self.now
        plan = self.scheduler.schedule(started)
        if plan:
            work = plan.work
            launched = started + self._host.schedule(len(plan.rows))
            seconds = self._times.seconds(work) * self._factor(work)
            self._compute(work, seconds)
            self._device_free = max(self._device_free, launched) + seconds
            self._flights.append(_Flight(plan, work, started, launched, self._device_free))
            self.now = launched
        elif not self._flights:
            raise RuntimeError("the scheduler has work but planned none")
        if not plan or len(self._flights) > self.scheduler.lookahead:
            self._collect(self._flights.popleft())

    def _collect(self, flight: _Flight) -> None:
        last_end = self.scheduler.counters.last_step_end
        self.now = max(self.now, flight.ends)
        rows = [
            RowResult([Sampled(sampler.seed) for sampler in row.samplers]) if row.samplers else NOTHING
            for row in flight.plan.rows
        ]
        deltas = self.scheduler.apply(StepResult(rows), self.now)
        if self.step_records is not None:
            wall, planning = self.now - flight.launched, flight.launched - flight.started
            busy = self.now - max(flight.launched, last_end)
            self.step_records.append(
                StepRecord(flight.plan.step_id, flight.started, *flight.work, wall, planning, busy)
            )
        self._publish(deltas)
        self.now += self._host.turn(len(flight.plan.rows))

    def _fast_forward(self) -> bool:
        """Take the upcoming decode-only iterations at once, up to the next arrival."""
        run = self.scheduler.decode_run()
        if run is None or run.iterations < SHORTEST_RUN:
            return False
        batch = len(run.sequences)
        if batch not in self._lines:
            self._lines[batch] = self._times.decode_line(batch)
        base, per_context = self._lines[batch]
        planning, turning = self._host.schedule(batch), self._host.turn(batch)
        due = self._clients.due
        until = due[0][0] if due else float("inf")
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
        self._extent.add(work, seconds)

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────

    def result(self) -> SimulatedRun:
        total = self.scheduler.pool.num_blocks
        stats = self.scheduler.stats()
        caveats = self._extent.caveats(self.busy_s)
        if self._traffic.name in self._times.fitted_on:
            caveats.append(f"the step times were fitted on this same traffic, {self._traffic.name!r}")
        if self._times.source != "fitted":
            caveats.append(f"step times are {self._times.source}: no step of this machine was measured")
        return SimulatedRun(
            records=self._clients.records(),
            steps=stats.steps,
            busy_s=self.busy_s,
            duration_s=max(self.now, self._traffic.duration_s),
            kv_use=KvUse(
                mean=self._held_s / self.busy_s / total if self.busy_s else 0.0,
                peak=self._held_peak / total,
            ),
            stats=stats,
            caveats=caveats,
            step_records=self.step_records or [],
        )


def _token_of(seq: Sequence) -> int:
    return seq.seed
