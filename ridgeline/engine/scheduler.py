"""Scheduler: what the next step computes, and what became of the last one.

The engine's loop calls add() and abort() as messages come, then schedule(), lets a runner execute the plan,
and gives its result to apply(). It owns every sequence and, through the pool, every KV block. It has no
tensors, no clock and no I/O, so tests and the simulator drive it as it is.

With `lookahead`, a step is planned while the one before it is in flight: from tokens that will exist,
whatever they are. What is found out late (a stop, an abort, an error) ends a sequence at once; what steps in
flight still compute of it is nobody's, and its blocks stay its own until they have landed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from ridgeline.engine.admission import Admission
from ridgeline.engine.block_pool import BlockPool
from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.forecast import OutputLengths
from ridgeline.engine.intake import Pace, SchedulerLimits, refuse_unservable, sequences_of
from ridgeline.engine.integrity import check_integrity
from ridgeline.engine.prefix_index import PrefixIndex
from ridgeline.engine.queue import ServiceOrder
from ridgeline.engine.request import FinishReason, Request, SeqState, Sequence
from ridgeline.engine.sequence_blocks import SequenceBlocks
from ridgeline.engine.step import RowResult, Sampled, SeqDelta, StepPlan, StepResult, StepRow, TokenLogprob
from ridgeline.telemetry.stats import EngineStats

__all__ = ["Scheduler", "SchedulerLimits"]

_order = attrgetter("order")

LEAST_STEP_TOKENS = 256  # below this a smaller step saves no memory worth naming


@dataclass(slots=True)
class Counters:
    """Since the start; the names are those of EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_step_end: float = 0.0


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
        self.step_tokens = limits.step_tokens  # the budget; less once the device ran out of memory
        self.index = PrefixIndex(limits.block_size, limits.model_salt)
        self.pool = BlockPool(limits.num_blocks, limits.block_size, self.index)
        self.blocks = SequenceBlocks(self.pool, limits.prefix_cache)
        self.output_lengths = output_lengths or OutputLengths()
        self.waiting = ServiceOrder()
        self.running = ServiceOrder()
        self.counters = Counters()
        self._rng = rng or random.Random()
        self._samples: dict[str, list[Sequence]] = {}  # request id → its n sequences, until all have ended
        self._in_flight: deque[StepPlan] = deque()  # scheduled, not yet applied
        self._leaving: set[Sequence] = set()  # ended, with blocks that a step in flight still writes
        self._retired: list[Sequence] = []  # for the next plan, so that the runner hears of it
        self._giving_way: Sequence | None = None  # in flight, and to be preempted when it has landed
        self._shedding = False  # nobody is admitted until a step has succeeded again
        self._pace = Pace()
        self._num_added = 0
        self._num_scheduled = 0

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest or QueueFull. What is accepted ends or is aborted."""
        if request.request_id in self._samples:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already being served")
        refuse_unservable(request, self.limits)
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(len(self.waiting), self._pace.retry_after_s(len(self.waiting)))
        samples = sequences_of(request, self.limits, self._num_added, lambda: self._rng.getrandbits(63))
        self._num_added += 1
        self._samples[request.request_id] = samples
        self.waiting.add(samples[0])

    def abort(self, request_id: str, now: float, index: int | None = None) -> list[SeqDelta]:
        """End a request, or one of its samples that already has output. What has ended stays as it is.

        Blocks are freed at once; those that a step in flight writes, when it is applied.
        """
        samples = self._samples.get(request_id, [])
        chosen = samples if index is None else [s for s in samples if s.index == index and s.num_output]
        return [self._fail(s, FinishReason.ABORT, now) for s in chosen if s.state is not SeqState.FINISHED]

    # ── the step ─────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> StepPlan:
        """Choose what the next step computes. Decodes first: they hold KV and a waiting user."""
        plan = StepPlan(step_id=self._num_scheduled, budget=self.step_tokens)
        room = self._plan_running(plan, now)
        if room and self.waiting:
            self._plan_waiting(room, plan, now)
        if plan:
            self._num_scheduled += 1
            self._in_flight.append(plan)
            plan.retired, self._retired = self._retired, []
        return plan

    def apply(self, result: StepResult, now: float) -> list[SeqDelta]:
        """Take in the result of the oldest step in flight, and say what it added to whom."""
        if not self._in_flight:
            raise RuntimeError("apply() without a step in flight: an empty plan has no result")
        plan = self._in_flight.popleft()
        deltas: list[SeqDelta] = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            self._land(row)
            if row.seq.state is not SeqState.FINISHED:  # else it ended in flight, and the token is nobody's
                self._apply_row(row, outcome, now, deltas)
        self.counters.steps += 1
        self.counters.last_step_end = now
        self._shedding = False
        return deltas

    def abandon(self, reason: str, now: float) -> list[SeqDelta]:
        """No step in flight will have a result: everything they compute ends with this error."""
        deltas: list[SeqDelta] = []
        while self._in_flight:
            rows = [RowResult(error=reason)] * len(self._in_flight[0].rows)
            deltas += self.apply(StepResult(rows), now)
        return deltas

    def shed(self, now: float) -> list[SeqDelta]:
        """The device has no memory for the one step in flight: withdraw it, and do less from now on.

        The newest half of its sequences is preempted. Nobody is admitted before a step has succeeded, so the
        next one is smaller, and so on down to a single sequence; if even that is too much, it ends.
        """
        (plan,) = self._in_flight
        self._in_flight.clear()
        self._shedding = True
        self.step_tokens = max(self.step_tokens // 2, min(self.step_tokens, LEAST_STEP_TOKENS))
        for row in plan.rows:
            self._land(row)
            if not row.seq.furthest:
                row.seq.timing.first_prefill = None
        alive = sorted((row.seq for row in plan.rows if row.seq.state is SeqState.RUNNING), key=_order)
        if len(plan.rows) == len(alive) == 1 and plan.num_tokens <= LEAST_STEP_TOKENS:
            error = "out of memory: the device cannot compute this sequence even alone"
            return [self._fail(seq, FinishReason.ERROR, now, error) for seq in self._dependents(alive[0])]
        # Whoever was to get a copy of a block has the copy in its table, and it was never made.
        targets = {copy.target for copy in plan.copies}
        for place, seq in enumerate(alive):
            if place >= len(alive) // 2 or not targets.isdisjoint(seq.block_table):
                self._preempt(seq, plan)
        return []

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────

    def _plan_running(self, plan: StepPlan, now: float) -> int:
        """Those who decode, then those with more to compute. Returns the room that is left."""
        room, self._giving_way = plan.budget, None
        prefills: list[Sequence] = []
        for seq in self.running:  # whoever is preempted meanwhile stands behind `seq`, or is `seq`
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

    def _plan_waiting(self, room: int, plan: StepPlan, now: float) -> None:
        if len(self.running) >= self.limits.max_running:
            return
        # Who was preempted a moment ago would be the first to be admitted again: not in the same step.
        if plan.preempted or (self._shedding and self.running):
            return
        leaving_blocks = sum(len(seq.block_table) for seq in self._leaving)
        admission = Admission(self.limits, self.blocks, self.output_lengths, self.running, leaving_blocks)
        while room and self.waiting:
            seq = self.waiting.first
            hits = admission.hits(seq)
            if hits is None or admission.awaits_prefix(seq, hits):
                break
            self._admit(seq, hits, now)
            admission.joined(seq, hits)
            room -= self._compute(seq, room, plan, now)

    def _may_go_ahead(self, seq: Sequence, length: int) -> bool:
        """It is in flight; may it be planned again before the result is known?

        length: with the tokens that are being sampled. At max_len it will have ended.
        """
        return (
            seq.steps_in_flight <= self.lookahead
            and length < seq.max_len
            and length != seq.forks_at
            and not seq.needs_host
            and seq is not self._giving_way
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
            samplers = self._dependents(seq)
            seq.pending += 1
            for sibling in samplers[1:]:
                sibling.steps_in_flight += 1
                sibling.has_row = True
        wants_prompt = seq.owes_prompt_logprobs and start + count > seq.prompt_logprobs_sent
        plan.rows.append(StepRow(seq, start, count, samplers, wants_prompt))
        if seq.timing.first_prefill is None:
            seq.timing.first_prefill = now
        return count

    def _dependents(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Who lives on what is computed for `seq`: itself, and until the prompt is done its siblings."""
        return (seq,) if seq.num_output else tuple(self._samples[seq.request.request_id])

    def _reserve(self, seq: Sequence, position: int, plan: StepPlan) -> bool:
        """A place for the next token's KV, if need be at the cost of those behind in the order of service.

        Decodes are planned in that order, so a victim is never in the plan yet, and the first in the order
        is never a victim: it always makes progress. A victim in flight is not planned further, so at a later
        step nothing of it is in flight, and all its tokens are known: then it gives way.
        """
        while not self.blocks.make_writable(seq, position, plan.copies):
            if self._leaving:
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
        """Take everything from a running sequence. It is computed again later, but for what stays cached."""
        self.running.remove(seq)
        self._retire(seq)
        seq.num_computed = 0
        seq.state = SeqState.WAITING
        self.waiting.add(seq)
        seq.timing.preemptions += 1
        seq.timing_sent = False
        self.counters.preemptions += 1
        plan.preempted.append(seq)

    def _admit(self, seq: Sequence, hits: list[int], now: float) -> None:
        self.blocks.take(seq, hits)
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.state = SeqState.RUNNING
        seq.has_row = True
        if seq.timing.admitted is None:
            seq.timing.admitted = now
            seq.timing.cached_tokens = seq.num_computed
            self.counters.prefix_queries += seq.prompt_len
            self.counters.prefix_hits += seq.num_computed

    def _retire(self, seq: Sequence) -> None:
        """Nothing of it is in flight, and for now nothing will be."""
        self.blocks.give_back(seq)
        if seq.has_row:
            seq.has_row = False
            self._retired.append(seq)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────

    def _land(self, row: StepRow) -> None:
        """The row is no longer in flight, whether it was computed or withdrawn."""
        seq, samplers = row.seq, row.samplers
        seq.in_flight -= row.count
        seq.steps_in_flight -= 1
        if samplers:
            seq.pending -= 1
            for sibling in samplers[1:]:
                sibling.steps_in_flight -= 1
                if sibling.state is SeqState.FINISHED:
                    self._leave(sibling)
        if seq.state is SeqState.FINISHED:
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """It ended in flight; with the last step that had it, it lets go."""
        if not seq.steps_in_flight:
            self._leaving.remove(seq)
            self._retire(seq)

    def _apply_row(self, row: StepRow, outcome: RowResult, now: float, deltas: list[SeqDelta]) -> None:
        seq = row.seq
        if outcome.error is not None:
            deltas += [self._fail(s, FinishReason.ERROR, now, outcome.error) for s in self._dependents(seq)]
            return
        self._advance(seq, row.count)
        prompt_logprobs = outcome.prompt_logprobs
        if len(seq.tokens) > seq.prompt_len and row.samplers and not prompt_logprobs:  # nearly always
            (sampled,) = outcome.samples
            deltas.append(self._append(seq, sampled, prompt_logprobs, now))
            return
        if prompt_logprobs:
            prompt_logprobs = prompt_logprobs[max(0, seq.prompt_logprobs_sent - row.start) :]
            seq.prompt_logprobs_sent += len(prompt_logprobs)
        if not row.samplers:
            if prompt_logprobs:
                deltas.append(SeqDelta(seq.request.request_id, seq.index, prompt_logprobs=prompt_logprobs))
            return
        if len(seq.tokens) == seq.prompt_len:
            self._complete_prompt(row)
        for sampler, sampled in zip(row.samplers, outcome.samples, strict=True):
            deltas.append(self._append(sampler, sampled, prompt_logprobs if sampler is seq else [], now))

    def _advance(self, seq: Sequence, count: int) -> None:
        if seq.num_computed < seq.furthest:  # it was preempted once
            again = min(seq.num_computed + count, seq.furthest) - seq.num_computed
            seq.timing.recomputed_tokens += again
            self.counters.recomputed_tokens += again
        self.blocks.advance(seq, count)
        if seq.num_computed > seq.furthest:
            seq.furthest = seq.num_computed

    def _complete_prompt(self, row: StepRow) -> None:
        """The prompt's KV is there: from now on each sibling runs by itself, on the same blocks."""
        first = row.seq
        self.counters.prompt_tokens += first.prompt_len
        for sibling in row.samplers[1:]:
            self.blocks.fork(first, sibling)
            sibling.furthest = first.furthest
            sibling.prompt_logprobs_sent = first.prompt_logprobs_sent
            sibling.timing.admitted = first.timing.admitted
            sibling.timing.first_prefill = first.timing.first_prefill
            sibling.timing.cached_tokens = first.timing.cached_tokens
            sibling.state = SeqState.RUNNING
            self.running.add(sibling)

    def _append(
        self, seq: Sequence, sampled: Sampled, prompt_logprobs: list[TokenLogprob], now: float
    ) -> SeqDelta:
        """One more token. Its own KV is written by the next step."""
        if sampled.error is not None:
            return self._fail(seq, FinishReason.ERROR, now, sampled.error)
        token = sampled.token
        seq.tokens.append(token)
        seq.timing.token_times.append(now)
        self.counters.output_tokens += 1
        logprobs = [] if sampled.logprob is None else [sampled.logprob]
        stop_token = reason = None
        if token in seq.end_ids and seq.num_output > seq.params.min_tokens:
            stop_token, reason = token, FinishReason.STOP
        elif len(seq.tokens) >= seq.max_len:
            reason = FinishReason.LENGTH
        elif seq.timing_sent:
            return SeqDelta(seq.request.request_id, seq.index, [token], logprobs, prompt_logprobs)
        if reason is not None:
            self._end(seq, reason, now)
            self.output_lengths.record(seq.num_output)
        seq.timing_sent = True
        return SeqDelta(
            seq.request.request_id,
            seq.index,
            [token],
            logprobs,
            prompt_logprobs,
            reason,
            stop_token,
            timing=seq.timing,
        )

    def _fail(self, seq: Sequence, reason: FinishReason, now: float, error: str | None = None) -> SeqDelta:
        """End a sequence for another reason than its own tokens."""
        self._end(seq, reason, now, error)
        return SeqDelta(
            seq.request.request_id, seq.index, finish_reason=reason, error=error, timing=seq.timing
        )

    def _end(self, seq: Sequence, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Out of whichever list it is in; its blocks go back now, or when the step in flight has landed."""
        queued_or_running = self.running if seq.state is SeqState.RUNNING else self.waiting
        if seq in queued_or_running:  # a sibling waiting for its prompt is in neither
            queued_or_running.remove(seq)
        seq.state = SeqState.FINISHED
        seq.finish_reason = reason
        seq.error = error
        seq.timing.end = now
        seq.timing.end_reason = reason.value
        if seq.steps_in_flight:
            self._leaving.add(seq)
        else:
            self._retire(seq)
        samples = self._samples[seq.request.request_id]
        if all(s.state is SeqState.FINISHED for s in samples):
            del self._samples[seq.request.request_id]
            self._pace.record(now)

    # ── what can be seen from outside ────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._in_flight)

    def stats(self) -> EngineStats:
        counters = self.counters
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
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
            step_tokens=self.step_tokens,
        )

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running sequences are not touched. Returns the blocks set free."""
        return self.pool.drop_cached()

    def check_integrity(self) -> None:
        """Raise PoolCorrupted unless every block and every sequence is where it must be."""
        check_integrity(
            self.blocks, self.running, self.waiting, self._leaving, self._in_flight, self._samples.values()
        )
