"""Scheduler: decides what the next step computes and applies the result of the last one.

The engine's loop calls add() and abort() as messages arrive, then schedule(), lets a runner execute the
plan, and passes the result to apply(). The scheduler owns every sequence and, through the pool, every KV
block. It has no tensors, no clock and no I/O, so tests and the simulator run it unchanged.

With `lookahead`, a step is planned while the previous one is in flight, before its tokens are known. A late
event (a stop, an abort, an error) ends a sequence at once; what steps in flight still compute for it is
discarded, and its blocks are released when they have landed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator
from operator import attrgetter

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.kv.block_pool import BlockPool
from ridgeline.engine.kv.prefix_index import PrefixIndex
from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.schedule.admission import Admission
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.intake import SchedulerLimits, make_sequences, refuse_unservable
from ridgeline.engine.schedule.integrity import integrity_pieces
from ridgeline.engine.schedule.request import FinishReason, Request, SeqState, Sequence, is_background
from ridgeline.engine.schedule.sequence_states import SequenceStates
from ridgeline.engine.schedule.step import RowResult, SeqDelta, StepPlan, StepResult, StepRow
from ridgeline.engine.schedule.step_budget import LEAST_TOKENS, StepBudget
from ridgeline.telemetry.stats import EngineStats

__all__ = ["Scheduler", "SchedulerLimits"]

_order = attrgetter("order")


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        rng: random.Random | None = None,
        output_lengths: OutputLengths | None = None,
        lookahead: int = 0,
    ) -> None:
        """lookahead: how many steps in flight a sequence may have and still be planned again."""
        self.limits = limits
        self.lookahead = lookahead
        self.budget = StepBudget(limits.step_tokens)
        self.index = PrefixIndex(limits.block_size, limits.model_salt)
        self.pool = BlockPool(limits.num_blocks, limits.block_size, self.index)
        self.blocks = SequenceBlocks(self.pool, limits.prefix_cache)
        self.output_lengths = output_lengths or OutputLengths()
        self._sequences = SequenceStates(self.blocks, self.output_lengths)
        self.waiting = self._sequences.waiting
        self.running = self._sequences.running
        self.counters = self._sequences.counters
        self._rng = rng or random.Random()
        self._in_flight: deque[StepPlan] = deque()  # scheduled, not yet applied
        self._preempting: Sequence | None = None  # in flight, to be preempted when it has landed
        self._shedding = False  # no admission until a step has succeeded again
        self._interactive_seen = -math.inf  # when an interactive request was last present
        self._planned_at = -math.inf  # when the newest plan was made
        self._busy_from = -math.inf  # when the first sequence ran after a pause
        self._num_added = 0
        self._num_scheduled = 0

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest or QueueFull. Accepted requests finish or are aborted."""
        if request.request_id in self._sequences.samples:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already being served")
        refuse_unservable(request, self.limits)
        waiting = self._num_waiting(background=is_background(request.priority))
        if waiting >= self.limits.max_waiting:
            raise QueueFull(waiting, self._sequences.completion_rate.retry_after_s(waiting))
        samples = make_sequences(request, self.limits, self._num_added, lambda: self._rng.getrandbits(63))
        self._num_added += 1
        self._sequences.add(samples)

    def abort(self, request_id: str, now: float, index: int | None = None) -> list[SeqDelta]:
        """End a request, or one of its samples that already has output. Finished samples are not changed.

        Blocks are freed at once, or, if a step in flight writes them, when that step is applied.
        """
        samples = self._sequences.samples.get(request_id, [])
        chosen = samples if index is None else [s for s in samples if s.index == index and s.num_output]
        return [
            self._sequences.fail(s, FinishReason.ABORT, now)
            for s in chosen
            if s.state is not SeqState.FINISHED
        ]

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> StepPlan:
        """Choose what the next step computes. Decodes first: they hold KV and a waiting user.

        Interactive sequences always precede background ones.
        """
        plan = StepPlan(step_id=self._num_scheduled, budget=self.budget.tokens)
        self._preempting = None
        self._planned_at = now
        if not (self.running or self._in_flight):
            self._busy_from = now
        room = self._plan_running(self.running.interactive, plan.budget, plan, now)
        if room and self.waiting.num_interactive:
            room = self._plan_waiting(False, room, plan, now)
        if self.running.num_interactive or self.waiting.num_interactive:
            self._interactive_seen = now
        if self.running.has_background or self.waiting.has_background:
            self._plan_background(room, plan, now)
        if plan:
            self._num_scheduled += 1
            self._in_flight.append(plan)
            plan.retired, self._sequences.retired = self._sequences.retired, []
        return plan

    def add_drafts(self, row: StepRow, drafts: list[int], room: int) -> int:
        """Let a decode of the newest plan guess the tokens that follow. Returns the number of drafts taken.

        Fewer than given if the budget, the sequence's end or the free blocks allow no more: a draft never
        preempts another sequence.
        """
        seq, plan = row.seq, self._in_flight[-1]
        if row.count != 1 or not row.samplers or row.start + 1 != len(seq.tokens) or not seq.num_output:
            return 0  # not a decode, or its token is still being sampled
        most = min(len(drafts), room, seq.max_len - len(seq.tokens) - 1)
        taken = 0
        while taken < most and self.blocks.make_writable(seq, row.start + 1 + taken, plan.copies):
            taken += 1
        row.drafts = tuple(drafts[:taken])
        row.count += taken
        seq.in_flight += taken
        seq.drafted = taken
        return taken

    def room_for_drafts(self, plan: StepPlan) -> int:
        """Tokens that drafts may add to the newest plan: beside background rows, up to the limit of those."""
        most = plan.budget
        if any(row.seq.background for row in plan.rows):
            most = min(most, self._most_with_background(self._planned_at))
        return max(0, most - plan.num_tokens)

    def apply(self, result: StepResult, now: float) -> list[SeqDelta]:
        """Apply the result of the oldest step in flight. Returns what it added to each sequence."""
        if not self._in_flight:
            raise RuntimeError("apply() without a step in flight: an empty plan has no result")
        plan = self._in_flight.popleft()
        deltas: list[SeqDelta] = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            self._sequences.land(row)
            if row.count > 1 and not row.drafts:  # also of a sequence that has ended: the step computed it
                self.counters.prefill_tokens += row.count
            if row.seq.state is not SeqState.FINISHED:  # else it finished in flight: discard the token
                self._sequences.apply_row(row, outcome, now, deltas)
        self.counters.steps += 1
        self.counters.busy_s += now - max(self._busy_from, self.counters.last_step_end)
        self.counters.last_step_end = now
        self._shedding = False
        self.budget.step_succeeded()
        return deltas

    def abandon(self, reason: str, now: float) -> list[SeqDelta]:
        """No step in flight will have a result: end everything they compute with this error."""
        deltas: list[SeqDelta] = []
        while self._in_flight:
            rows = [RowResult(error=reason)] * len(self._in_flight[0].rows)
            deltas += self.apply(StepResult(rows), now)
        return deltas

    def shed(self, now: float) -> list[SeqDelta]:
        """The device ran out of memory for the only step in flight: withdraw it and halve the step's budget.

        The newest half of its sequences is preempted. Nothing is admitted until a step has succeeded, so each
        retry is smaller, down to a single sequence; if that does not fit either, it ends with an error.
        """
        (plan,) = self._in_flight
        self._in_flight.clear()
        self._shedding = True
        self.budget.reduce()
        for row in plan.rows:
            self._sequences.land(row)
            if row.drafts and row.seq.state is SeqState.RUNNING:
                self.blocks.trim(row.seq)
            if not row.seq.furthest:
                row.seq.timing.first_prefill = None
                row.seq.timing.chunk_times.clear()
        alive = sorted((row.seq for row in plan.rows if row.seq.state is SeqState.RUNNING), key=_order)
        if len(plan.rows) == len(alive) == 1 and plan.num_tokens <= LEAST_TOKENS:
            error = "out of memory: the device cannot compute this sequence on its own"
            return [
                self._sequences.fail(seq, FinishReason.ERROR, now, error)
                for seq in self._sequences.dependents(alive[0])
            ]
        # The block table already names the copy, but the copy was never made.
        targets = {copy.target for copy in plan.copies}
        for place, seq in enumerate(alive):
            if place >= len(alive) // 2 or not targets.isdisjoint(seq.block_table):
                self._preempt(seq, plan)
        return []

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────

    def _plan_running(self, sequences: list[Sequence], room: int, plan: StepPlan, now: float) -> int:
        """Plan the decodes, then sequences with more to compute. Returns the tokens left in the budget."""
        prefills: list[Sequence] = []
        for seq in sequences:  # a sequence preempted in this loop comes after `seq`, or is `seq`
            if seq.state is not SeqState.RUNNING:
                continue
            length = len(seq.tokens) + seq.pending
            if seq.steps_in_flight and not self._may_plan_ahead(seq, length):
                continue
            start = seq.num_computed + seq.in_flight
            if length - start > 1:
                prefills.append(seq)
            elif not room:
                break
            elif self._reserve(seq, start, plan):
                room -= self._compute(seq, room, plan, now)
        for seq in prefills:
            if room:
                room -= self._compute(seq, room, plan, now)
        return room

    def _plan_waiting(self, background: bool, room: int, plan: StepPlan, now: float) -> int:
        """Admit sequences of one class from the head of the queue. Returns the tokens left in the budget."""
        waiting, running = self.waiting, self.running
        # A sequence preempted in this step would be admitted first: wait for the next step.
        if any(seq.background == background for seq in plan.preempted) or (self._shedding and running):
            return room
        staying, preemptible = (running.all, []) if background else (running.interactive, running.background)
        if len(staying) >= self.limits.max_running:
            return room
        draining_blocks = sum(len(seq.block_table) for seq in self._sequences.draining)
        admission = Admission(
            self.limits, self.blocks, self.output_lengths, staying, preemptible, draining_blocks
        )
        while room and waiting and waiting.first.background == background:
            seq = waiting.first
            hits = admission.hits(seq)
            if hits is None or admission.awaits_prefix(seq, hits):
                break
            if not self._make_room(seq, hits, admission, plan):
                break
            self._sequences.admit(seq, hits, now)
            admission.admitted(seq, hits)
            room -= self._compute(seq, room, plan, now)
        return room

    def _plan_background(self, room: int, plan: StepPlan, now: float) -> None:
        room = self._room_for_background(room, plan, now)
        if room > 0:
            room = self._plan_running(self.running.background, room, plan, now)
        if room > 0 and self.waiting and not self.waiting.num_interactive:
            self._plan_waiting(True, room, plan, now)

    def _room_for_background(self, room: int, plan: StepPlan, now: float) -> int:
        """The tokens of this step that background sequences may use without slowing interactive ones.

        None while an interactive prompt is computed or queued. While there is interactive traffic, few enough
        that the step stays short for the next arrival, and fewer while interactive ones decode. Otherwise
        all.
        """
        if self.waiting.num_interactive and not self._shedding:
            return 0
        if any(row.count > 1 or row.start < row.seq.prompt_len for row in plan.rows):
            return 0
        return min(room, self._most_with_background(now) - plan.num_tokens)

    def _most_with_background(self, now: float) -> int:
        """The most tokens of a step with background rows: few while there is interactive traffic."""
        limits = self.limits
        if now - self._interactive_seen > limits.background_quiet_s:
            return limits.step_tokens
        return limits.background_tokens_beside if self.running.num_interactive else limits.background_tokens

    def _make_room(self, seq: Sequence, hits: list[int], admission: Admission, plan: StepPlan) -> bool:
        """Whether `seq` has slots and blocks now. Preempts running background sequences if needed."""
        while not admission.fits_now(seq, hits):
            if self._sequences.draining or not admission.preemptible:
                return False
            victim = admission.preemptible[-1]
            # As in _reserve(); no other background sequence is planned while `seq` waits.
            if victim.steps_in_flight:
                return False
            self._preempt(victim, plan)
            admission.remove_victim()
        return True

    def _may_plan_ahead(self, seq: Sequence, length: int) -> bool:
        """Whether a sequence in flight may be planned again before its result is known.

        length: counts the tokens being sampled. At max_len the sequence will have ended.
        """
        return (
            seq.steps_in_flight <= self.lookahead
            and length < seq.max_len
            and length != seq.forks_at
            and seq is not self._preempting
            and not seq.owes_prompt_logprobs
            and not seq.drafted
        )

    def _compute(self, seq: Sequence, room: int, plan: StepPlan, now: float) -> int:
        """Add as much of `seq` to the plan as its chunk and the remaining budget allow."""
        start, length = seq.num_computed + seq.in_flight, len(seq.tokens) + seq.pending
        seq.steps_in_flight += 1
        if start >= seq.prompt_len and start + 1 == length:  # nearly every row of nearly every step
            plan.rows.append(StepRow(seq, start, 1, (seq,)))
            seq.in_flight += 1
            seq.pending += 1
            return 1
        count = min(length - start, self.limits.prefill_chunk, room)
        seq.in_flight += count
        samplers: tuple[Sequence, ...] = ()
        if start + count == length:
            samplers = self._sequences.dependents(seq)
            seq.pending += 1
            for sibling in samplers[1:]:
                sibling.steps_in_flight += 1
                sibling.has_row = True
        wants_prompt = seq.owes_prompt_logprobs and start + count > seq.prompt_logprobs_sent
        plan.rows.append(StepRow(seq, start, count, samplers, wants_prompt))
        seq.timing.chunk_times.append(now)
        if seq.timing.first_prefill is None:
            seq.timing.first_prefill = now
        return count

    def _reserve(self, seq: Sequence, position: int, plan: StepPlan) -> bool:
        """Get a block for the next token's KV, preempting sequences later in the service order if needed.

        Decodes are planned in that order, so a victim is never in the plan yet, and the first sequence is
        never a victim: it always makes progress. A victim in flight is not planned again; it is preempted at
        a later step, when it has landed and all its tokens are known.
        """
        while not self.blocks.make_writable(seq, position, plan.copies):
            if self._sequences.draining:
                return False  # their blocks are released when the step in flight lands
            victim = self.running.last
            if victim.steps_in_flight:
                self._preempting = victim
                return False
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self._sequences.preempt(seq)
        plan.preempted.append(seq)

    # ── what can be seen from outside ────────────────────────────────────────────────────────────────────

    def _num_waiting(self, background: bool) -> int:
        """The two classes are counted separately: neither fills the other's queue."""
        interactive = self.waiting.num_interactive
        return len(self.waiting) - interactive if background else interactive

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._in_flight)

    def stats(self) -> EngineStats:
        counters = self.counters
        return EngineStats(
            running=len(self.running),
            waiting=self._num_waiting(background=False),
            waiting_background=self._num_waiting(background=True),
            kv_blocks_total=self.pool.num_blocks,
            kv_blocks_held=self.pool.num_held,
            kv_blocks_cached=self.pool.num_cached,
            block_size=self.limits.block_size,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prefix_evicted=counters.prefix_evicted,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            steps=counters.steps,
            busy_s=counters.busy_s,
            prefill_tokens=counters.prefill_tokens,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            last_step_end=counters.last_step_end,
            step_tokens=self.budget.tokens,
        )

    def reset_prefix_cache(self) -> int:
        """Drop every cached prefix; running sequences keep theirs. Returns the number of freed blocks."""
        return self.pool.drop_cached()

    def check_integrity(self) -> None:
        """Raise PoolCorrupted unless every block and every sequence is where it must be."""
        for _ in self.integrity_pieces():
            pass

    def integrity_pieces(self) -> Generator[None, None, bool]:
        """As `check_integrity`, in pieces of under a millisecond. The scheduler may go on between two of
        them: then it returns False, without a verdict."""
        return integrity_pieces(
            self.blocks,
            self.running,
            self.waiting,
            self._sequences.draining,
            self._in_flight,
            self._sequences.samples.values(),
        )
