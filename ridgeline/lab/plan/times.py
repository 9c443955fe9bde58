"""Step times for a deployment: fitted on this machine where that was done, else from first principles.

Used by `make`. Which of the two, and how far off it may be, goes into every prediction.
"""

from __future__ import annotations

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.plan.analytic import engine_constants, predict_tpot, predict_ttft
from ridgeline.lab.plan.ask import Demand
from ridgeline.lab.plan.estimate import Times
from ridgeline.lab.plan.search import Way
from ridgeline.lab.simulate import FrontTimes
from ridgeline.lab.simulate.analytic import analytic_times
from ridgeline.lab.simulate.stored import kept_times, settings_of

# Of whole runs, at least: the steps of nine replays within a quarter of an hour of their fit took 3 to 13 %
# longer in all than it says (docs/simulator.md), on a virtual machine that did nothing else.
FITTED_SPREAD = 0.12
OVERLAPPED_STEPS = 1  # a GPU's engine launches a step before the last one is read


def times_of(model: str, way: Way, demand: Demand, config: EngineConfig) -> Times:
    deployment = way.deployment
    lookahead = 0 if deployment.chip.name == "cpu" else OVERLAPPED_STEPS
    kept = None
    if deployment.backend == "ridgeline":
        kept = kept_times(model, deployment.chip.name, settings_of(config))
    if kept is not None:
        steps, front = kept
        spread = max(FITTED_SPREAD, steps.spread)
        return Times(steps, front, 1 - spread / (1 + spread), 1 + spread, lookahead)
    isl, osl = max(1, round(demand.mean_input)), max(1, round(demand.mean_output))
    known = predict_tpot(deployment, way.batch, isl, osl)
    steps = analytic_times(deployment)
    # Half of it on the way in; what comes back is late by the other half, every chunk alike.
    half = engine_constants(deployment).first_s / 2
    front = FrontTimes(request_s=half, first_s=half, chunk_s=half)
    first = predict_ttft(deployment, way.batch, isl, osl)
    return Times(
        steps,
        front,
        known.low / known.mid,
        known.high / known.mid,
        lookahead,
        first.low / first.mid,
        first.high / first.mid,
    )
