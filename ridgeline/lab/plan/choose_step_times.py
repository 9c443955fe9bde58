"""Times: the step times of a deployment, fitted on this machine if available, else from first principles.

Used by `make_plan`. The method and its uncertainty are part of every prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.hardware.this_machine import load_per_core
from ridgeline.lab.perfmodel.analytic_times import analytic_times
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_formula import engine_constants, predict_tpot, predict_ttft
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.perfmodel.stored import kept_times, settings_of
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.plan.search import Candidate

# Minimum spread of whole runs: the steps of nine replays within 15 minutes of their fit took 3 to 13 %
# longer in total than predicted (docs/simulator.md), on an otherwise idle virtual machine.
FITTED_SPREAD = 0.12
FRESH_S = 900.0  # for which that holds; load, clock and kernel change over time
AGE_SPREAD = 0.05  # added per tenfold of that age: 0.1 after a day, 0.17 after a month
UNSTEADY = 0.15  # changes of speed or load above this share are reported
OVERLAPPED_STEPS = 1  # a GPU engine launches a step before the previous one is read


@dataclass(frozen=True, slots=True)
class Times:
    """Step times of one deployment, their uncertainty, and the number of steps launched ahead.

    low, high: factors on all step times that cover the truth in 80 % of cases
    first_low, first_high: of times to first token, which are less certain without measured steps
    """

    steps: StepTimes
    front: FrontTimes
    low: float
    high: float
    lookahead: int = 0
    first_low: float = 1.0
    first_high: float = 1.0
    caveats: tuple[str, ...] = ()  # what to know about them, in words

    @property
    def method(self) -> str:
        """As named by predictions and residuals."""
        return "simulated" if self.steps.source == "fitted" else "analytic"


def times_of(model: str, candidate: Candidate, demand: Demand, config: EngineConfig) -> Times:
    deployment = candidate.deployment
    lookahead = 0 if deployment.chip.name == "cpu" else OVERLAPPED_STEPS
    kept = None
    if deployment.backend == "ridgeline":
        kept = kept_times(model, deployment.chip.name, settings_of(config))
    if kept is not None:
        steps, front = kept
        load = load_per_core() if deployment.chip.name == "cpu" else None
        low, high, caveats = fitted_range(steps, datetime.now(UTC), load)
        return Times(steps, front, low, high, lookahead, caveats=caveats)
    isl, osl = max(1, round(demand.mean_input)), max(1, round(demand.mean_output))
    known = predict_tpot(deployment, candidate.batch, isl, osl)
    steps = analytic_times(deployment)
    # Half of it before the engine, the other half after it, equally for every chunk.
    half = engine_constants(deployment).first_s / 2
    front = FrontTimes(request_s=half, first_s=half, chunk_s=half)
    first = predict_ttft(deployment, candidate.batch, isl, osl)
    return Times(
        steps,
        front,
        known.low / known.mid,
        known.high / known.mid,
        lookahead,
        first.low / first.mid,
        first.high / first.mid,
    )


def fitted_range(
    steps: StepTimes, now: datetime, load: float | None = None
) -> tuple[float, float, tuple[str, ...]]:
    """Factors on a fit's step times that cover the truth in 80 % of cases, and caveats.

    Widened by the error on held-out traces, by changes of the machine's speed during the fit, by the fit's
    age, and by the change of load: r runnable tasks per core leave a task 1 / (1 + r) of a core.

    load: runnable tasks per core now, on the machine that was fitted; None: unknown
    """
    age_s = max(_age_s(steps, now), FRESH_S)
    spread = max(FITTED_SPREAD, steps.spread) + AGE_SPREAD * math.log10(age_s / FRESH_S)
    low, high = min(1 / (1 + spread), steps.speeds[0]), max(1 + spread, steps.speeds[1])
    caveats = []
    if steps.speeds[1] - steps.speeds[0] > UNSTEADY:
        caveats.append(
            f"the machine was busy while it was fitted: seconds of work took {steps.speeds[0]:.2g} to "
            f"{steps.speeds[1]:.2g} times the fit's; `plan fit` on an idle machine narrows this"
        )
    if load is not None and steps.load_before is not None:
        slower = (1 + load) / (1 + steps.load_before)
        low, high = low * min(1.0, slower), high * max(1.0, slower)
        if abs(slower - 1) > UNSTEADY:
            caveats.append(
                f"load now is {load:.2g} tasks per core, and was {steps.load_before:.2g} before the fit: "
                f"steps may take {slower:.2g} times as long"
            )
    return low, high, tuple(caveats)


def _age_s(steps: StepTimes, now: datetime) -> float:
    try:
        return (now - datetime.fromisoformat(steps.made_at)).total_seconds()
    except (ValueError, TypeError):  # unknown, or without a time zone
        return 0.0
