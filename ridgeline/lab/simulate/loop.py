"""simulate(): the engine's scheduler, KV pool and prefix index under traffic, driven by a simulated clock.

Arrivals come from `clients`, steps are taken by `engine`. A step takes the time that `StepTimes` predicts;
tokens are made up. Runs of decode-only steps are taken at once (`fast_forward`), with the same result as one
by one. Nothing here decides what is computed.
"""

from __future__ import annotations

import heapq
import random

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.simulate.clients import Clients
from ridgeline.lab.simulate.engine import SimulatedEngine
from ridgeline.lab.simulate.prompts import TokenPrompts
from ridgeline.lab.simulate.run import SimulatedRun
from ridgeline.lab.simulate.speculation import DraftFigures
from ridgeline.lab.traffic.request import Traffic


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
    drafts: DraftFigures | None = None,
) -> SimulatedRun:
    """concurrency:  requests or conversations in a closed loop at a time; None: sent at their planned times
    lookahead:    steps launched before the oldest is read, as in the engine's runner
    noise:        draw each step's time from the residuals of the fit; otherwise use the expected time
    fast_forward: False: take every step separately, to compare the two
    keep_steps:   record every step, as the engine does; costs time and memory
    drafts:       speculation with guesses that are right this often; None: without
    """
    if concurrency is not None and concurrency < 1:
        raise BadInput(f"a closed loop needs a concurrency of at least 1, got {concurrency}")
    simulation = _Simulation(
        traffic, limits, times, front or FrontTimes(), concurrency, lookahead, seed, drafts
    )
    simulation.engine.noise = random.Random(seed) if noise else None
    simulation.engine.step_records = [] if keep_steps else None
    simulation.run(fast_forward and not keep_steps)
    return simulation.result()


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
        drafts: DraftFigures | None = None,
    ) -> None:
        self.engine = SimulatedEngine(limits, times, lookahead, seed, self._publish, drafts)
        self._times, self._front = times, front
        self._clients = Clients(traffic, front, concurrency)
        self._prompts = TokenPrompts(traffic)
        self._traffic = traffic

    def run(self, fast_forward: bool) -> None:
        clients, engine = self._clients, self.engine
        while True:
            while clients.due and clients.due[0][0] <= engine.now:
                self._receive(heapq.heappop(clients.due)[1])
            until = clients.due[0][0] if clients.due else float("inf")
            if not engine.scheduler.has_work:
                if not clients.due:
                    return
                engine.now = until
            elif not (fast_forward and engine.fast_forward(until)):
                engine.iterate()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, index: int) -> None:
        planned = self._traffic.requests[index]
        token = self._prompts.answer_token(index)
        # The seed is what its made-up tokens are: see _token_of.
        params = SamplingParams(max_tokens=max(planned.output_tokens, 1), ignore_eos=True, seed=token)
        arrival = self._clients.sent[index]
        try:
            self.engine.scheduler.add(
                Request(str(index), self._prompts.prompt(index), params, arrival=arrival)
            )
        except (QueueFull, InvalidRequest) as error:
            status = 429 if isinstance(error, QueueFull) else 400
            self._clients.refused(index, self.engine.now + self._front.first_s, status, str(error))

    def _publish(self, deltas: list[SeqDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                assert delta.timing is not None  # it comes with the end
                self._clients.answered(int(delta.request_id), delta.timing)

    # ── the result ───────────────────────────────────────────────────────────────────────────────────────

    def result(self) -> SimulatedRun:
        engine = self.engine
        stats = engine.scheduler.stats()
        caveats = engine.extent.caveats(engine.busy_s)
        if self._traffic.name in self._times.fitted_on:
            caveats.append(f"the step times were fitted on this same traffic, {self._traffic.name!r}")
        if self._times.source != "fitted":
            caveats.append(f"step times are {self._times.source}: no step of this machine was measured")
        return SimulatedRun(
            records=self._clients.records(),
            steps=stats.steps,
            busy_s=engine.busy_s,
            duration_s=max(engine.now, self._traffic.duration_s),
            kv_use=engine.kv_use,
            stats=stats,
            caveats=caveats,
            step_records=engine.step_records or [],
        )
