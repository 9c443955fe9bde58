"""EngineCore: the body of the engine's loop: scheduler, runner and the engine's own metrics.

Driven by `engine_loop` (one engine behind a socket) and by `llm` (in the caller's process). `step()` is one
iteration of the loop, plain or overlapped. It waits only for the device and does no other I/O.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.engine.errors import DeviceLost, DeviceOutOfMemory, EngineError, InvalidRequest, QueueFull
from ridgeline.engine.grammar.compiler import GrammarCompiler
from ridgeline.engine.grammar.grammar_queue import GrammarQueue
from ridgeline.engine.run.runner import CountsExperts, DeviceRunner, Runner
from ridgeline.engine.schedule.intake import refuse_unservable
from ridgeline.engine.schedule.request import FinishReason, Request, SeqState
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import RowResult, SeqDelta, StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.telemetry.stats import EngineStats, StepRecord
from ridgeline.telemetry.step_ring import StepRing

log = logging.getLogger(__name__)


QUIET_S = 0.02  # without a step, before idle work begins


@dataclass(slots=True)
class StepInFlight:
    """A step launched on the runner and not yet applied."""

    plan: StepPlan
    planned_from: float
    launched_at: float
    launched_step: Any = None  # what the runner's `launch` returned
    launch_s: float = 0.0


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ring_size: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        lookahead: int | None = None,
        grammars: GrammarCompiler | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """lookahead: steps launched before the oldest in flight is read; None: the runner's own value.
        It is always 0 for a runner that computes synchronously.

        grammars: compiles the grammars of requests; without it, requests with a grammar are rejected.
        speculation: adds drafts to steps; for runners that verify them.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.steps = StepRing(ring_size)
        self._clock = clock
        self.last_step_end = 0.0
        self._checked = True  # nothing has changed since the last integrity check
        self._check: Generator[None, None, bool] | None = None  # under way
        self.grammars = grammars
        self.speculation = speculation
        self._grammar_queue = GrammarQueue()  # requests whose grammar is being compiled
        self._device = runner if isinstance(runner, DeviceRunner) else None
        self._steps_in_flight: deque[StepInFlight] = deque()  # launched, not yet collected
        self._counted_before: dict[int, list[int]] = {}  # tokens of the warm-up, by layer and expert
        most = self._device.lookahead if self._device else 0
        scheduler.lookahead = most if lookahead is None else min(lookahead, most)

    def add(self, request: Request) -> None:
        """Queue the request, or, if it has a grammar, queue it once the grammar is compiled.

        Raises InvalidRequest or QueueFull; the engine is then unchanged. Errors found later in a grammar are
        returned by `admit_compiled`.
        """
        if request.params.grammar is None or request.compiled is not None:
            self._refuse_for_device(request)
            self.scheduler.add(request)
        else:
            self._add_constrained(request)

    def refuse_unservable(self, request: Request) -> None:
        """Raise InvalidRequest for a request that `add` never accepts, even with an empty queue."""
        self._refuse_for_device(request)
        refuse_unservable(request, self.scheduler.limits)

    def _refuse_for_device(self, request: Request) -> None:
        refusal = self._device.refusal(request.params) if self._device is not None else None
        if refusal is not None:
            raise InvalidRequest(*refusal)

    def _add_constrained(self, request: Request) -> None:
        if self.grammars is None or request.params.grammar is None:
            raise InvalidRequest("grammar", "is not supported by this engine")
        if request.request_id in self._grammar_queue:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already being served")
        self.refuse_unservable(request)
        if len(self._grammar_queue) >= self.scheduler.limits.max_waiting:
            raise QueueFull(len(self._grammar_queue), 1.0)
        compilation = self.grammars.begin(request.params.grammar)
        if compilation.done.is_set():
            self.scheduler.add(replace(request, compiled=compilation.result()))
        else:
            self._grammar_queue.add(request, compilation)

    def admit_compiled(self) -> list[tuple[str, EngineError]]:
        """Queue the requests whose grammars are compiled. Returns those that are rejected after all."""
        refused: list[tuple[str, EngineError]] = []
        for request, compilation in self._grammar_queue.pop_ready():
            try:
                self.scheduler.add(replace(request, compiled=compilation.result()))
            except (InvalidRequest, QueueFull) as error:
                refused.append((request.request_id, error))
        return refused

    def abort(self, request_id: str, index: int | None = None) -> list[SeqDelta]:
        """Abort this request, or one sample of it.

        Unknown ids are ignored: the request may just have finished.
        """
        waited = self._grammar_queue.remove(request_id) if index is None else None
        if waited is not None and self.grammars is not None:
            request, compilation = waited
            self.grammars.cancel(compilation)
            return [
                SeqDelta(request_id, sample, finish_reason=FinishReason.ABORT)
                for sample in range(request.params.n)
            ]
        return self.scheduler.abort(request_id, self._clock(), index)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[SeqDelta]:
        """One iteration of the loop. Returns what was added to each sequence; empty if a step was only
        launched. If it is interrupted (Ctrl-C), no step stays in flight and the scheduler stays
        consistent."""
        try:
            if self._device is not None and self.scheduler.lookahead:
                return self._overlapped_step(self._device)
            return self._plain_step()
        except BaseException:
            self._steps_in_flight.clear()
            self.scheduler.abandon("interrupted", self._clock())
            raise

    def _plain_step(self) -> list[SeqDelta]:
        """Plan, compute, apply."""
        step = self._plan()
        if step is None:
            return []
        try:
            result = self.runner.execute(step.plan)
        except DeviceOutOfMemory as error:
            return self._shed(step, error)
        except DeviceLost:
            raise
        except Exception:
            result = self._execute_one_by_one(step.plan)
        return self._land(step, result)

    def _overlapped_step(self, device: DeviceRunner) -> list[SeqDelta]:
        """Plan, launch, and only then read the previous step, so that the device always has work.

        A grammar knows its allowed tokens only after the previous token is read. So rows under a grammar are
        sampled after that read, while the forward pass that was just launched runs. Guesses follow tokens
        that are known: where they pay, the previous step is read before the next one is planned.
        """
        deltas: list[SeqDelta] = []
        if self._steps_in_flight and self._pays_to_wait(self._steps_in_flight[-1].plan):
            deltas = self._collect_all(device)
        step = self._plan()
        if step is not None:
            try:
                step.launched_step = device.launch(step.plan)
            except DeviceLost:
                raise
            except Exception as error:
                return deltas + self._recover(step, error, device)
            step.launch_s = self._clock() - step.launched_at
            self._steps_in_flight.append(step)
        if self._steps_in_flight and (step is None or len(self._steps_in_flight) > self.scheduler.lookahead):
            deltas += self._collect(device)
        if step is not None:
            deltas += self._complete(step, device)
        return deltas

    def drain(self) -> list[SeqDelta]:
        """Collect the steps in flight and launch no more. Called by callers that leave the loop."""
        return self._collect_all(self._device) if self._device is not None else []

    def idle(self) -> bool:
        """Called when there is nothing to do: after a while, does a small piece of checking that no block was
        lost, then of the runner's idle work. A user whose requests follow each other never meets it.

        Returns True if there may be more of it.
        """
        if self._clock() < self.last_step_end + QUIET_S:
            return True
        if not self._checked:
            self._check_piece()
            return True
        return self._device is not None and self._device.idle()

    def check_integrity(self) -> None:
        """All of the check at once."""
        self.scheduler.check_integrity()
        self._checked, self._check = True, None

    def _check_piece(self) -> None:
        if self._check is None:
            self._check = self.scheduler.integrity_pieces()
        try:
            next(self._check)
        except StopIteration as end:
            self._checked, self._check = end.value, None  # False: something changed meanwhile
        except BaseException:
            self._check = None
            raise

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._grammar_queue:
            stats = replace(stats, waiting=stats.waiting + len(self._grammar_queue))
        return stats if self.speculation is None else replace(stats, speculation=self.speculation.stats())

    def expert_counts(self) -> dict[int, list[int]]:
        """Tokens that chose each expert since the warm-up, by layer; empty without experts."""
        counts = self.runner.expert_counts() if isinstance(self.runner, CountsExperts) else {}
        before = self._counted_before
        return {
            layer: [
                now - then for now, then in zip(tokens, before.get(layer, [0] * len(tokens)), strict=True)
            ]
            for layer, tokens in counts.items()
        }

    def start_counting_experts(self) -> None:
        """Leave out what the runner has counted so far."""
        self._counted_before = {}
        self._counted_before = self.expert_counts()

    # ── the parts of a step ──────────────────────────────────────────────────────────────────────────────

    def _plan(self) -> StepInFlight | None:
        started = self._clock()
        plan = self.scheduler.schedule(started)
        if self.speculation is not None and plan:
            most = self._device.most_samples if self._device is not None else None
            self._speculate(lambda speculation: speculation.extend(plan, self.scheduler, most))
        for seq in plan.preempted:
            if seq.background:  # expected: background work yields to interactive work
                log.debug("preempted background sequence %s; %d tokens", seq.name, len(seq.tokens))
                continue
            log.warning(
                "preempted %s: no KV block left; %d tokens will be recomputed", seq.name, len(seq.tokens)
            )
        return StepInFlight(plan, started, self._clock()) if plan else None

    def _pays_to_wait(self, plan: StepPlan) -> bool:
        if self.speculation is None:
            return False
        found = [False]
        self._speculate(lambda speculation: found.append(speculation.pays_to_wait(plan)))
        return found[-1]

    def _speculate(self, work: Callable[[Speculation], None]) -> None:
        """Answers need no guesses: an error among them ends speculation, not the engine."""
        assert self.speculation is not None
        try:
            work(self.speculation)
        except Exception:
            log.exception("speculation failed; it is off until the engine starts again")
            self.speculation = None

    def _collect(self, device: DeviceRunner) -> list[SeqDelta]:
        """Collect the oldest step in flight. If it failed, all its rows end: their KV is undefined."""
        step = self._steps_in_flight.popleft()
        try:
            result = device.collect(step.launched_step)
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("step %d failed on the device; ending its sequences", step.plan.step_id)
            result = StepResult([RowResult(error=_failure(error))] * len(step.plan.rows))
        return self._land(step, result)

    def _complete(self, step: StepInFlight, device: DeviceRunner) -> list[SeqDelta]:
        """Finish the newest step: the part that needed the previous step to be applied first."""
        try:
            device.complete(step.launched_step)
        except DeviceLost:
            raise
        except Exception as error:
            self._steps_in_flight.pop()
            return self._recover(step, error, device)
        return []

    def _recover(self, step: StepInFlight, error: Exception, device: DeviceRunner) -> list[SeqDelta]:
        """The newest step could not be launched, or only in part."""
        deltas = self._collect_all(device)  # first: its rows may depend on what is in flight
        if isinstance(error, DeviceOutOfMemory):
            return deltas + self._shed(step, error)
        return deltas + self._land(step, self._execute_one_by_one(step.plan))

    def _collect_all(self, device: DeviceRunner) -> list[SeqDelta]:
        deltas: list[SeqDelta] = []
        while self._steps_in_flight:
            deltas += self._collect(device)
        return deltas

    def _land(self, step: StepInFlight, result: StepResult) -> list[SeqDelta]:
        ended = self._clock()
        budget, before = self.scheduler.budget, self.scheduler.budget.tokens
        deltas = self.scheduler.apply(result, ended)
        if budget.tokens > before:
            log.info("steps have succeeded again: the step budget is back to %d tokens", budget.tokens)
        if self.speculation is not None:
            seconds = ended - max(step.planned_from, self.last_step_end)
            self._speculate(lambda speculation: speculation.landed(step.plan, result, seconds))
        self.steps.append(_record(step, self.last_step_end, ended))
        self.last_step_end = ended
        self._checked = False
        return deltas

    def _shed(self, step: StepInFlight, error: DeviceOutOfMemory) -> list[SeqDelta]:
        """No other step is in flight, and this one has no result."""
        deltas = self.scheduler.shed(self._clock())
        self._checked = False
        log.error(
            "out of device memory in step %d with %d rows, %d tokens (%s); steps are limited to %d tokens"
            " until %d steps have succeeded. Lower --max-running or --step-tokens to avoid this",
            step.plan.step_id,
            len(step.plan.rows),
            step.plan.num_tokens,
            error,
            self.scheduler.budget.tokens,
            self.scheduler.budget.trial_steps,
        )
        return deltas

    def _execute_one_by_one(self, plan: StepPlan) -> StepResult:
        """A forward pass failed: run its rows again, one at a time. Only rows that fail again end."""
        log.exception("step %d failed; running its %d rows one by one", plan.step_id, len(plan.rows))
        return StepResult([self._execute_row(plan, row) for row in plan.rows])

    def _execute_row(self, plan: StepPlan, row: StepRow) -> RowResult:
        if row.seq.state is SeqState.FINISHED:  # finished by a step that was in flight before this one
            return RowResult()
        # Each row with its own copies only: other rows' copies would overwrite what was written after them.
        copies = [copy for copy in plan.copies if copy.target in row.seq.block_table]
        alone = replace(plan, rows=[row], copies=copies, retired=[])
        try:
            return self.runner.execute(alone).rows[0]
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("%s failed on its own too; ending only this sequence", row.seq.name)
            return RowResult(error=_failure(error))


def _failure(error: Exception) -> str:
    return f"the forward pass failed: {type(error).__name__}: {error}"


def _record(step: StepInFlight, last_end: float, ended: float) -> StepRecord:
    return StepRecord(
        step.plan.step_id,
        step.planned_from,
        *step.plan.work,
        wall_s=ended - step.launched_at,
        schedule_s=step.launched_at - step.planned_from,
        busy_s=ended - max(step.launched_at, last_end),
        launch_s=step.launch_s,
    )
