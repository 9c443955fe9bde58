"""analytic_times(): StepTimes without measured steps, from first principles.

Evaluates `analytic.step_seconds` for steps of all sizes and fits the simulator's terms to the results; the
caller states how far off first principles are (`intervals`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import msgspec

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.perfmodel.fit_steps import fit_step_times
from ridgeline.lab.perfmodel.step_formula import Deployment, step_seconds
from ridgeline.lab.perfmodel.step_times import HostTimes, StepTimes
from ridgeline.telemetry.stats import StepRecord

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (64, 512, 1500, 4000, 12_000)
CHUNKS = (16, 48, 128, 256, 512, 1024, 2048, 4096, 8192)
BESIDE = (0, 4, 24, 96, 256)  # decodes


def analytic_times(deployment: Deployment) -> StepTimes:
    times = times_from(
        lambda work: step_seconds(
            deployment,
            work.prefill_tokens,
            work.prefill_context_product,
            work.decode_batch,
            work.decode_context,
            work.prefill_rows,
        )
    )
    about = {"model": deployment.shape.name, "hardware": deployment.chip.name, "engine": deployment.backend}
    return msgspec.structs.replace(times, about=about)


def times_from(seconds: Callable[[StepWork], float]) -> StepTimes:
    """The terms that best fit a function of a step's work."""
    work = [StepWork(0, 0, 0, batch, batch * context) for batch, context in product(BATCHES, CONTEXTS)]
    for chunk, before, batch, context in product(CHUNKS, (0, *CONTEXTS), BESIDE, CONTEXTS[1:4]):
        work.append(StepWork(chunk, 1, chunk * (before + chunk), batch, batch * context))
    random.Random(0).shuffle(work)  # the fit holds out parts in turn: each must contain all sizes
    records = []
    for number, step in enumerate(work):
        took = seconds(step)
        records.append(StepRecord(number, 0.0, *step, took, 0.0, took))
    times = fit_step_times({"first principles": records}, is_noisy=False)
    return msgspec.structs.replace(times, source="analytic", host=HostTimes())
