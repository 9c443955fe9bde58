"""EngineCore: scheduler and runner in one loop body, with the engine's own figures.

Driven by `process` (one engine behind a socket) and by `llm` (in the caller's process). `step()` plans,
computes and applies one step; nothing here blocks, sleeps or talks to anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ridgeline.engine.request import Request
from ridgeline.engine.runner import Runner
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.step import RowResult, SeqDelta, StepPlan, StepResult, StepRow
from ridgeline.telemetry.stats import EngineStats, StepRecord
from ridgeline.telemetry.step_ring import StepRing

log = logging.getLogger(__name__)


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ring_size: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.steps = StepRing(ring_size)
        self._clock = clock
        self.last_step_end = 0.0
        self._checked = True  # nothing has changed since the last integrity check

    def add(self, request: Request) -> None:
        """Queue the request. Raises InvalidRequest or QueueFull; then the engine is as it was."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[SeqDelta]:
        """Nobody waits for this request (or this one sample of it) any more.

        Unknown ids are ignored: it may just have finished.
        """
        return self.scheduler.abort(request_id, self._clock(), index)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[SeqDelta]:
        """One step: plan, compute, apply. Returns what was added to each sequence."""
        started = self._clock()
        plan = self.scheduler.schedule(started)
        for seq in plan.preempted:
            log.warning(
                "preempted %s: no KV block left; %d tokens will be computed again", seq.name, len(seq.tokens)
            )
        if not plan:
            return []
        planned = self._clock()
        try:
            result = self._execute(plan)
        except BaseException:  # Ctrl-C: no step stays in flight, and the books balance
            self.scheduler.apply(StepResult([RowResult(error="interrupted")] * len(plan.rows)), self._clock())
            raise
        ended = self._clock()
        deltas = self.scheduler.apply(result, ended)
        self.last_step_end = ended
        self._checked = False
        self.steps.append(_record(plan, started, planned - started, ended - planned))
        return deltas

    def idle(self) -> None:
        """Called when there is nothing to do: the time to check that no block was lost."""
        if not self._checked:
            self.scheduler.check_integrity()
            self._checked = True

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run the plan. If the pass fails, run its rows one by one: only those that fail again end."""
        try:
            return self.runner.execute(plan)
        except Exception:
            log.exception("step %d failed; running its %d rows one by one", plan.step_id, len(plan.rows))
        return StepResult([self._execute_row(plan, row) for row in plan.rows])

    def _execute_row(self, plan: StepPlan, row: StepRow) -> RowResult:
        # Each with its own copies alone: those of others would undo what these have written into them.
        copies = [copy for copy in plan.copies if copy.target in row.seq.block_table]
        alone = replace(plan, rows=[row], copies=copies)
        try:
            return self.runner.execute(alone).rows[0]
        except Exception as error:
            log.exception("%s failed alone too; only it ends", row.seq.name)
            return RowResult(error=f"the forward pass failed: {type(error).__name__}: {error}")


def _record(plan: StepPlan, started: float, schedule_s: float, wall_s: float) -> StepRecord:
    prefill_tokens = prefill_rows = context_product = decode_batch = decode_context = 0
    for row in plan.rows:
        context = row.start + row.count
        if row.count == 1 and row.start > 0:
            decode_batch += 1
            decode_context += context
        else:
            prefill_rows += 1
            prefill_tokens += row.count
            context_product += row.count * context
    return StepRecord(
        step_id=plan.step_id,
        start=started,
        prefill_tokens=prefill_tokens,
        prefill_rows=prefill_rows,
        prefill_context_product=context_product,
        decode_batch=decode_batch,
        decode_context=decode_context,
        wall_s=wall_s,
        schedule_s=schedule_s,
    )
