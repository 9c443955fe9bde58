"""Rehearsal: the speculation of a warm-up request, for a drafter that computes.

The drafter's first passes compile kernels and allocate memory. Afterwards it is known what a pass takes, so
that no ask in service has to find out.
"""

from __future__ import annotations

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.speculation import Speculation

PROMPT, OUTPUT = 40, 10  # tokens: some are read before the first of several drafts


class Rehearsal(Speculation):
    def __init__(self, speculation: Speculation) -> None:
        """speculation: of a drafter that computes"""
        super().__init__(speculation.drafter, speculation.vocab_size, fixed_length=1)
        self._real = speculation
        self._seqs: set[Sequence] = set()

    def extend(self, plan: StepPlan, scheduler: Scheduler, most_samples: int | None = None) -> None:
        self._seqs.update(row.seq for row in plan.rows)
        super().extend(plan, scheduler, most_samples)

    def end(self) -> None:
        """No further plan retires the sequences."""
        for seq in self._seqs:
            self.drafter.forget(seq)
        if self._real.asking is not None and self.asking is not None:
            self._real.asking.times = self.asking.times
