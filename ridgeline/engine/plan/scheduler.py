"""Scheduler: what the next step computes, and what became of the last one.

The engine's loop calls add() and abort() as messages come, then schedule(), lets a runner execute the plan,
and gives its result to apply(). It owns every sequence and, through the pool, every KV block. It has no
tensors, no clock and no I/O, so tests and the simulator drive it as it is.

With `lookahead`, a step is planned while the one before it is in flight: from tokens that will exist,
whatever they are. What is found out late (a stop, an abort, an error) ends a sequence at once; what steps in
flight still compute of it is nobody's, and its blocks stay its own until they have landed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.kv.block_pool import BlockPool
from ridgeline.engine.kv.prefix_index import PrefixIndex
from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.plan.admission import Admission
from ridgeline.engine.plan.decode_run import DecodeRun, find_run, grow_sequences
from ridgeline.engine.plan.forecast import OutputLengths
from ridgeline.engine.plan.intake import SchedulerLimits, refuse_unservable, sequences_of
from ridgeline.engine.plan.integrity import check_integrity
from ridgeline.engine.plan.request import FinishReason, Request, SeqState, Sequence, is_background
from ridgeline.engine.plan.roster import Roster
from ridgeline.engine.plan.step import RowResult, SeqDelta, StepPlan, StepResult, StepRow
from ridgeline.engine.plan.step_budget import LEAST_TOKENS, StepBudget
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
        """lookahead: for how many steps in flight a sequence may be planned once more."""
        self.limits = limits
        self.lookahead = lookahead
        self.budget = StepBudget(limits.step_tokens)
        self.index = PrefixIndex(limits.block_size, limits.model_salt)
        self.pool = BlockPool(limits.num_blocks, limits.block_size, self.index)
        self.blocks = SequenceBlocks(self.pool, limits.prefix_cache)
        self.output_lengths = output_lengths or OutputLengths()
        self._roster = Roster(self.blocks, self.output_lengths)
        self.waiting = self._roster.waiting
        self.running = self._roster.running
        self.counters = self._roster.counters
        self._rng = rng or random.Random()
        self._in_flight: deque[StepPlan] = deque()  # scheduled, not yet applied
        self._giving_way: Sequence | None = None  # in flight, and to be preempted when it has landed
        self._shedding = False  # nobody is admitted until a step has succeeded again
        self._interactive_seen = -math.inf  # when a request that somebody waits for was last there
        self._num_added = 0
        self._num_scheduled = 0

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest or QueueFull. What is accepted ends or is aborted."""
        if request.request_id in self._roster.samples:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already being served")
        refuse_unservable(request, self.limits)
        waiting = self._num_waiting(background=is_background(request.priority))
        if waiting >= self.limits.max_waiting:
            raise QueueFull(waiting, self._roster.pace.retry_after_s(waiting))
        samples = sequences_of(request, self.limits, self._num_added, lambda: self._rng.getrandbits(63))
        self._num_added += 1
        self._roster.enter(samples)

    def abort(self, request_id: str, now: float, index: int | None = None) -> list[SeqDelta]:
        """End a request, or one of its samples that already has output. What has ended stays as it is.

        Blocks are freed at once; those that a step in flight writes, when it is applied.
        """
        samples = self._roster.samples.get(request_id, [])
        chosen = samples if index is None else [s for s in samples if s.index == index and s.num_output]
        return [
            self._roster.fail(s, FinishReason.ABORT, now) for s in chosen if s.state is not SeqState.FINISHED
        ]

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> StepPlan:
        """Choose what the next step computes. Decodes first: they hold KV and a waiting user.

        Whoever is interactive goes before whoever is in the background, in everything.
        """
        plan = StepPlan(step_id=self._num_scheduled, budget=self.budget.tokens)
        self._giving_way = None
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
            plan.retired, self._roster.retired = self._roster.retired, []
        return plan

    def apply(self, result: StepResult, now: float) -> list[SeqDelta]:
        """Take in the result of the oldest step in flight, and say what it added to whom."""
        if not self._in_flight:
            raise RuntimeError("apply() without a step in flight: an empty plan has no result")
        plan = self._in_flight.popleft()
        deltas: list[SeqDelta] = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            self._roster.land(row)
            if row.seq.state is not SeqState.FINISHED:  # else it ended in flight, and the token is nobody's
                self._roster.apply_row(row, outcome, now, deltas)
        self.counters.steps += 1
        self.counters.last_step_end = now
        self._shedding = False
        self.budget.step_succeeded()
        return deltas

    def abandon(self, reason: str, now: float) -> list[SeqDelta]:
        """No step in flight will have a result: everything they compute ends with this error."""
        deltas: list[SeqDelta] = []
        while self._in_flight:
            rows = [RowResult(error=reason)] * len(self._in_flight[0].rows)
            deltas += self.apply(StepResult(rows), now)
        return deltas

    def shed(self, now: float) -> list[SeqDelta]:
        """The device has no memory for the one step in flight: withdraw it, and halve the step's budget.

        The newest half of its sequences is preempted. Nobody is admitted before a step has succeeded, so the
        next one is smaller, and so on down to a single sequence; if even that is too much, it ends.
        """
        (plan,) = self._in_flight
        self._in_flight.clear()
        self._shedding = True
        self.budget.reduce()
        for row in plan.rows:
            self._roster.land(row)
            if not row.seq.furthest:
                row.seq.timing.first_prefill = None
        alive = sorted((row.seq for row in plan.rows if row.seq.state is SeqState.RUNNING), key=_order)
        if len(plan.rows) == len(alive) == 1 and plan.num_tokens <= LEAST_TOKENS:
            error = "out of memory: the device cannot compute this sequence even alone"
            return [
                self._roster.fail(seq, FinishReason.ERROR, now, error)
                for seq in self._roster.dependents(alive[0])
            ]
        # Whoever was to get a copy of a block has the copy in its table, and it was never made.
        targets = {copy.target for copy in plan.copies}
        for place, seq in enumerate(alive):
            if place >= len(alive) // 2 or not targets.isdisjoint(seq.block_table):
                self._preempt(seq, plan)
        return []

    # ── many steps at once, for the simulator ────────────────────────────────────────────────────────────

    def decode_run(self) -> DecodeRun | None:
        """The coming steps that only add a token to each running sequence; None: the next one does more.

        It holds while nobody is added or aborted, and no token ends a sequence before its length does.
        """
        running, limits = self.running.all, self.limits
        if self.budget.is_reduced:  # it may grow within the run
            return None
        may_join = len(running) < min(limits.max_running, limits.step_tokens)
        if not running or len(running) > limits.step_tokens or (self.waiting and may_join):
            return None
        if self._shedding or self._roster.leaving or running[-1].background or self.waiting.has_background:
            return None
        if any([row.seq for row in plan.rows] != running for plan in self._in_flight):
            return None
        if len(self._in_flight) != self.lookahead:
            return None
        return find_run(running, self.blocks, self.lookahead)

    def take_run(
        self, run: DecodeRun, planned_at: float, applied_at: list[float], token_of: Callable[[Sequence], int]
    ) -> None:
        """Take as many turns of the run as `applied_at` has moments; `planned_at`: of the last one's plan."""
        turns = len(applied_at)
        again = grow_sequences(run, self.blocks, self.lookahead, applied_at, token_of)
        self._giving_way = None
        self._interactive_seen = planned_at
        self._roster.retired = []
        self._num_scheduled += turns
        for plan in self._in_flight:
            plan.step_id += turns
            for row in plan.rows:
                row.start += turns
        counters = self.counters
        counters.steps += turns
        counters.output_tokens += turns * len(run.sequences)
        counters.recomputed_tokens += again
        counters.last_step_end = applied_at[-1]

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────

    def _plan_running(self, sequences: list[Sequence], room: int, plan: StepPlan, now: float) -> int:
        """Those who decode, then those with more to compute. Returns the room that is left."""
        prefills: list[Sequence] = []
        for seq in sequences:  # whoever is preempted meanwhile stands behind `seq`, or is `seq`
            if seq.state is not SeqState.RUNNING:
                continue
            length = len(seq.tokens) + seq.pending
            if seq.steps_in_flight and not self._may_go_ahead(seq, length):
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
        """Those of one class who may join, from the head of the queue. Returns the room that is left."""
        waiting, running = self.waiting, self.running
        # Who was preempted a moment ago would be the first to be admitted again: not in the same step.
        if any(seq.background == background for seq in plan.preempted) or (self._shedding and running):
            return room
        staying, yielding = (running.all, []) if background else (running.interactive, running.background)
        if len(staying) >= self.limits.max_running:
            return room
        leaving_blocks = sum(len(seq.block_table) for seq in self._roster.leaving)
        admission = Admission(
            self.limits, self.blocks, self.output_lengths, staying, yielding, leaving_blocks
        )
        while room and waiting and waiting.first.background == background:
            seq = waiting.first
            hits = admission.hits(seq)
            if hits is None or admission.awaits_prefix(seq, hits):
                break
            if not self._make_way(seq, hits, admission, plan):
                break
            self._roster.admit(seq, hits, now)
            admission.joined(seq, hits)
            room -= self._compute(seq, room, plan, now)
        return room

    def _plan_background(self, room: int, plan: StepPlan, now: float) -> None:
        room = self._room_for_background(room, plan, now)
        if room > 0:
            room = self._plan_running(self.running.background, room, plan, now)
        if room > 0 and self.waiting and not self.waiting.num_interactive:
            self._plan_waiting(True, room, plan, now)

    def _room_for_background(self, room: int, plan: StepPlan, now: float) -> int:
        """What a step has left for those nobody waits for: as much as nobody else will notice.

        Nothing while an interactive prompt is computed or waits. While there is interactive traffic, so much
        that the step stays a short one for whoever arrives next, and shorter for those who decode. Else all.
        """
        if self.waiting.num_interactive and not self._shedding:
            return 0
        if any(row.count > 1 or row.start < row.seq.prompt_len for row in plan.rows):
            return 0
        if now - self._interactive_seen <= self.limits.background_quiet_s:
            limits, decoding = self.limits, self.running.num_interactive
            most = limits.background_tokens_beside if decoding else limits.background_tokens
            return min(room, most - plan.num_tokens)
        return room

    def _make_way(self, seq: Sequence, hits: list[int], admission: Admission, plan: StepPlan) -> bool:
        """Places and blocks for `seq` now, if need be at the cost of background sequences that run."""
        while not admission.fits_now(seq, hits):
            if self._roster.leaving or not admission.yielding:
                return False
            victim = admission.yielding[-1]
            if victim.steps_in_flight:  # as in _reserve(); and none of its kind is planned while `seq` waits
                return False
            self._preempt(victim, plan)
            admission.yielded()
        return True

    def _may_go_ahead(self, seq: Sequence, length: int) -> bool:
        """It is in flight; may it be planned again before the result is known?

        length: with the tokens that are being sampled. At max_len it will have ended.
        """
        return (
            seq.steps_in_flight <= self.lookahead
            and length < seq.max_len
            and length != seq.forks_at
            and seq is not self._giving_way
            and not seq.owes_prompt_logprobs
        )

    def _compute(self, seq: Sequence, room: int, plan: StepPlan, now: float) -> int:
        """Put as much of `seq` into the plan as its chunk and the room allow."""
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
            samplers = self._roster.dependents(seq)
            seq.pending += 1
            for sibling in samplers[1:]:
                sibling.steps_in_flight += 1
                sibling.has_row = True
        wants_prompt = seq.owes_prompt_logprobs and start + count > seq.prompt_logprobs_sent
        plan.rows.append(StepRow(seq, start, count, samplers, wants_prompt))
        if seq.timing.first_prefill is None:
            seq.timing.first_prefill = now
        return count

    def _reserve(self, seq: Sequence, position: int, plan: StepPlan) -> bool:
        """A place for the next token's KV, if need be at the cost of those behind in the order of service.

        Decodes are planned in that order, so a victim is never in the plan yet, and the first in the order
        is never a victim: it always makes progress. A victim in flight is not planned further, so at a later
        step nothing of it is in flight, and all its tokens are known: then it gives way.
        """
        while not self.blocks.make_writable(seq, position, plan.copies):
            if self._roster.leaving:
                return False  # with the step in flight their blocks come back
            victim = self.running.last
            if victim.steps_in_flight:
                self._giving_way = victim
                return False
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self._roster.preempt(seq)
        plan.preempted.append(seq)

    # ── what can be seen from outside ────────────────────────────────────────────────────────────────────

    def _num_waiting(self, background: bool) -> int:
        """The two classes queue for themselves: neither fills the other's places."""
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
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            last_step_end=counters.last_step_end,
            step_tokens=self.budget.tokens,
        )

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running sequences are not touched. Returns the blocks set free."""
        return self.pool.drop_cached()

    def check_integrity(self) -> None:
        """Raise PoolCorrupted unless every block and every sequence is where it must be."""
        check_integrity(
            self.blocks,
            self.running,
            self.waiting,
            self._roster.leaving,
            self._in_flight,
            self._roster.samples.values(),
        )
