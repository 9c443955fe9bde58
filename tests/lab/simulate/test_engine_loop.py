"""The simulator against the engine's own loop: EngineCore with a device that takes the same times."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.prompts import TokenPrompts
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from tests.lab.simulate.small_engine import TIMES, limits

LIMITS = limits(num_blocks=40)


class ClockedDevice:
    """Computes nothing, and lets time pass as long as a step would take."""

    name = "clocked"
    most_samples = 1 << 20

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.now = self.free = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self.free = max(self.free, self.now) + TIMES.seconds(plan.work)
        return plan, self.free

    def complete(self, ticket: tuple[StepPlan, float]) -> None:
        pass

    def collect(self, ticket: tuple[StepPlan, float]) -> StepResult:
        plan, ends = ticket
        self.now = max(self.now, ends)
        return StepResult([RowResult([Sampled(7)] * len(row.samplers)) for row in plan.rows])

    def refusal(self, params: SamplingParams) -> None:
        return None

    def idle(self) -> bool:
        return False


def traffic() -> Traffic:
    """More than the places and blocks there are, with prefixes in common and idle moments. Answers are short
    at first, so that the forecast of longer ones fails, and sequences give way."""
    dice = random.Random(3)
    at, requests = 0.0, []
    for number in range(60):
        at += 3.0 if number % 20 == 19 else dice.expovariate(8)
        prefix = tuple(range(dice.randint(0, 3)))
        output = dice.randint(1, 2) if number < 20 else dice.randint(40, 160)
        requests.append(PlannedRequest(at, dice.randint(1, 120), output, prefix))
    return Traffic("busy", tuple(requests), prefix_block_tokens=48)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_simulator_takes_the_steps_that_the_engine_takes(lookahead: int) -> None:
    sent = traffic()
    device = ClockedDevice(lookahead)
    core = EngineCore(Scheduler(LIMITS), device, clock=lambda: device.now)
    prompts, coming = TokenPrompts(sent), list(enumerate(sent.requests))
    token_times: dict[str, list[float]] = {}
    while coming or core.has_work:
        while coming and coming[0][1].at <= device.now:  # as engine.process: between steps
            index, planned = coming.pop(0)
            params = SamplingParams(max_tokens=planned.output_tokens, ignore_eos=True, seed=index)
            core.add(Request(str(index), prompts.prompt(index), params, arrival=planned.at))
        if not core.has_work:
            device.now = coming[0][1].at
            continue
        for delta in core.step():
            if delta.finish_reason is not None and delta.timing is not None:
                token_times[delta.request_id] = delta.timing.token_times
    run = simulate(sent, LIMITS, TIMES, lookahead=lookahead, keep_steps=True)
    assert run.step_records == core.steps.dump()
    assert {str(record.index): record.chunk_at for record in run.records} == token_times
    assert run.preemptions == core.stats().preemptions > 0
    assert run.stats == core.stats()
    assert simulate(sent, LIMITS, TIMES, lookahead=lookahead).records == run.records
