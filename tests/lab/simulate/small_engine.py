"""Step times and limits of a small simulated engine."""

from __future__ import annotations

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.perfmodel.step_times import StepTimes, Terms

TIMES = StepTimes(
    decode=Terms(0.008, (0.0,), (0.001,), context_s=1e-5),
    mixed=Terms(0.010, (0.0, 32.0), (0.0005, 0.001), context_s=1e-5, context_product_s=1e-6, row_s=0.002),
)


def limits(num_blocks: int) -> SchedulerLimits:
    return SchedulerLimits(
        step_tokens=96,
        prefill_chunk=64,
        max_running=6,
        max_waiting=100,
        block_size=16,
        num_blocks=num_blocks,
        max_context=1024,
    )
