"""An engine whose steps take the time that a formula says, and whose text another formula: for the rule that
chooses draft lengths. No clock of this machine is read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.simulated_engine import limits

VOCAB = 1000
Text = Callable[[Sequence, int], int]  # the token of a sequence at a position
Cost = Callable[[int, int], float]  # seconds of a step, from its tokens and the KV tokens that it reads


class TimedRunner:
    name = "timed"

    def __init__(self, text: Text, cost: Cost, noise: float = 0.0) -> None:
        self.now = 0.0
        self._text = text
        self._cost = cost
        self._noise = noise
        self._rng = random.Random(3)

    def execute(self, plan: StepPlan) -> StepResult:
        context = sum(row.start + row.count for row in plan.rows)
        seconds = self._cost(plan.num_tokens, context)
        self.now += seconds * (1 + self._noise * self._rng.random())
        if self._noise and self._rng.random() < 0.02:
            self.now += 5 * seconds  # another program had the cores
        return StepResult([self._row(row) for row in plan.rows])

    def _row(self, row: StepRow) -> RowResult:
        if not row.samplers:
            return RowResult()
        first = row.start + row.count - len(row.drafts)
        samples = [Sampled(self._text(row.seq, first))]
        for place, draft in enumerate(row.drafts, start=1):
            if samples[-1].token != draft:
                break
            samples.append(Sampled(self._text(row.seq, first + place)))
        return RowResult(samples)


def generate(
    text: Text,
    cost: Cost,
    drafter: Drafter | None,
    *,
    streams: int = 1,
    tokens: int = 600,
    prompt: int = 40,
    noise: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, EngineCore]:
    """The seconds that all streams took, and the engine. clock: of drafting"""
    runner = TimedRunner(text, cost, noise)
    figures = limits(
        step_tokens=4096,
        prefill_chunk=4096,
        max_running=256,
        max_waiting=999,
        num_blocks=90_000,
        max_context=65_536,
    )
    speculation = None if drafter is None else Speculation(drafter, VOCAB, clock=clock)
    core = EngineCore(Scheduler(figures), runner, clock=lambda: runner.now, speculation=speculation)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for number in range(streams):
        core.add(Request(f"r{number}", [(7 * number + i) % VOCAB for i in range(prompt)], params))
    while core.has_work:
        core.step()
    return runner.now, core
