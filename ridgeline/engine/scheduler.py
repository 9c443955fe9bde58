"""Scheduler: what the next step computes, and what became of the last one.

The engine's loop calls add() and abort() as messages come, then schedule(), lets a runner execute the plan,
and gives its result to apply(). It owns every sequence and, through the pool, every KV block. It has no
tensors, no clock and no I/O, so tests and the simulator drive it as it is.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from ridgeline.engine.block_pool import BlockPool, PoolCorrupted
from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.forecast import Claim, OutputLengths, peak_blocks
from ridgeline.engine.intake import SchedulerLimits, refuse_unservable, sequences_of
from ridgeline.engine.prefix_index import PrefixIndex
from ridgeline.engine.queue import ServiceOrder
from ridgeline.engine.request import FinishReason, Request, SeqState, Sequence
from ridgeline.engine.sequence_blocks import SequenceBlocks
from ridgeline.engine.step import RowResult, Sampled, SeqDelta, StepPlan, StepResult, StepRow, TokenLogprob
from ridgeline.telemetry.stats import EngineStats

__all__ = ["Scheduler", "SchedulerLimits"]

RETRY_AFTER_RANGE_S = (1.0, 60.0)


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
    ) -> None:
        self.limits = limits
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
        self._busy: set[Sequence] = set()  # a step in flight writes their blocks: no freeing, no planning
        self._request_ends: deque[float] = deque(maxlen=64)
        self._num_added = 0
        self._num_scheduled = 0

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest or QueueFull. What is accepted ends or is aborted."""
        if request.request_id in self._samples:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already being served")
        refuse_unservable(request, self.limits)
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(len(self.waiting), self._retry_after_s())
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
        plan = StepPlan(step_id=self._num_scheduled, budget=self.limits.step_tokens)
        room = plan.budget
        decodes, prefills = self._ready()
        for seq in decodes:
            if room and seq.state is SeqState.RUNNING and self._reserve(seq, plan):
                room -= self._compute(seq, room, plan, now)
        for seq in prefills:
            if seq.state is SeqState.RUNNING:  # and was not preempted for a decode
                room -= self._compute(seq, room, plan, now)
        # Who was preempted a moment ago would be the first to be admitted again: not in the same step.
        while room and self.waiting and not plan.preempted:
            seq = self.waiting.first
            if not self._admit(seq, now):
                break
            room -= self._compute(seq, room, plan, now)
        if plan:
            self._num_scheduled += 1
            self._in_flight.append(plan)
            self._busy.update(row.seq for row in plan.rows)
        return plan

    def apply(self, result: StepResult, now: float) -> list[SeqDelta]:
        """Take in the result of the oldest step in flight, and say what it added to whom."""
        if not self._in_flight:
            raise RuntimeError("apply() without a step in flight: an empty plan has no result")
        plan = self._in_flight.popleft()
        deltas: list[SeqDelta] = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            self._busy.discard(row.seq)
            self._apply_row(row, outcome, now, deltas)
        self.counters.steps += 1
        self.counters.last_step_end = now
        return deltas

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Who runs and is in no step in flight: those who decode, and those with more to compute."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self.running:
            if seq not in self._busy:
                (prefills if seq.is_prefilling else decodes).append(seq)
        return decodes, prefills

    def _compute(self, seq: Sequence, room: int, plan: StepPlan, now: float) -> int:
        """Put as much of `seq` into the plan as its chunk and the room allow."""
        start, length = seq.num_computed, len(seq.tokens)
        if start >= seq.prompt_len and start + 1 == length and room:  # nearly every row of nearly every step
            plan.rows.append(StepRow(seq, start, 1, (seq,)))
            return 1
        count = min(length - start, self.limits.prefill_chunk, room)
        if count == 0:
            return 0
        samplers = self._dependents(seq) if start + count == length else ()
        wants_prompt = _owes_prompt_logprobs(seq) and start + count > seq.prompt_logprobs_sent
        plan.rows.append(StepRow(seq, start, count, samplers, wants_prompt))
        if seq.timing.first_prefill is None:
            seq.timing.first_prefill = now
        return count

    def _dependents(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Who lives on what is computed for `seq`: itself, and until the prompt is done its siblings."""
        return (seq,) if seq.num_output else tuple(self._samples[seq.request.request_id])

    def _reserve(self, seq: Sequence, plan: StepPlan) -> bool:
        """A place for the next token's KV, if need be at the cost of those behind in the order of service.

        Decodes are planned in that order, so a victim is never in the plan yet, and the first in the order
        is never a victim: it always makes progress.
        """
        while not self.blocks.make_writable(seq, plan.copies):
            victim = self.running.last
            if victim in self._busy:
                return False  # a step in flight writes its blocks; ask again at the next step
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Take everything from a running sequence. It is computed again later, but for what stays cached."""
        self.running.remove(seq)
        self.blocks.give_back(seq)
        seq.num_computed = 0
        seq.state = SeqState.WAITING
        self.waiting.add(seq)
        seq.timing.preemptions += 1
        seq.timing_sent = False
        self.counters.preemptions += 1
        plan.preempted.append(seq)

    # ── admission ────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, seq: Sequence, now: float) -> bool:
        """Let the first in the queue run, if it and those who run are expected to fit until they end."""
        if _slots(seq) + sum(map(_slots, self.running)) > self.limits.max_running:
            return False
        # Something is always left to compute: logits are not cached.
        usable = seq.prompt_logprobs_sent if _owes_prompt_logprobs(seq) else len(seq.tokens) - 1
        hits = self.blocks.cached_prefix(seq, usable)
        if self.blocks.num_missing(seq, hits) + self.blocks.num_idle(hits) > self.pool.available:
            return False
        if self.running and self._peak_with(seq, hits) > self.limits.num_blocks:
            return False
        self.blocks.take(seq, hits)
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.state = SeqState.RUNNING
        if seq.timing.admitted is None:
            seq.timing.admitted = now
            seq.timing.cached_tokens = seq.num_computed
            self.counters.prefix_queries += seq.prompt_len
            self.counters.prefix_hits += seq.num_computed
        return True

    def _peak_with(self, candidate: Sequence, hits: list[int]) -> int:
        """The most blocks held at once if `candidate` joins those who run."""
        claims = self._claims(candidate, len(hits))
        own_blocks = 0
        for seq in self.running:
            num_shared = self.blocks.num_shared(seq)
            own_blocks += len(seq.block_table) - num_shared
            claims += self._claims(seq, num_shared)
        shared_blocks = max(0, self.pool.num_held - own_blocks) + self.blocks.num_idle(hits)
        return peak_blocks(claims, self.limits.block_size, shared_blocks)

    def _claims(self, seq: Sequence, num_shared: int) -> list[Claim]:
        size, length = self.limits.block_size, len(seq.tokens)
        # One less: the KV of the last token is never written.
        growth = self.output_lengths.expected_left(seq.num_output, seq.max_len - length) - 1
        claims = [Claim(length - num_shared * size, growth)]
        return claims + [Claim(length % size, growth)] * (_slots(seq) - 1)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────

    def _apply_row(self, row: StepRow, outcome: RowResult, now: float, deltas: list[SeqDelta]) -> None:
        seq = row.seq
        if seq.state is SeqState.FINISHED:  # ended while the step was in flight: the token is nobody's
            self.blocks.give_back(seq)
            return
        if outcome.error is not None:
            deltas += [self._fail(s, FinishReason.ERROR, now, outcome.error) for s in self._dependents(seq)]
            return
        self._advance(seq, row.count)
        prompt_logprobs = outcome.prompt_logprobs
        if prompt_logprobs:
            prompt_logprobs = prompt_logprobs[max(0, seq.prompt_logprobs_sent - row.start) :]
            seq.prompt_logprobs_sent += len(prompt_logprobs)
        if not row.samplers:
            if prompt_logprobs:
                deltas.append(SeqDelta(seq.request.request_id, seq.index, prompt_logprobs=prompt_logprobs))
            return
        if not seq.num_output:
            self._complete_prompt(row)
        for sampler, sampled in zip(row.samplers, outcome.samples, strict=True):
            deltas.append(self._append(sampler, sampled, prompt_logprobs if sampler is seq else [], now))

    def _advance(self, seq: Sequence, count: int) -> None:
        if seq.num_computed < seq.furthest:  # it was preempted once
            again = min(seq.num_computed + count, seq.furthest) - seq.num_computed
            seq.timing.recomputed_tokens += again
            self.counters.recomputed_tokens += again
        self.blocks.advance(seq, count)
        seq.furthest = max(seq.furthest, seq.num_computed)

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
        seq.tokens.append(sampled.token)
        seq.timing.token_times.append(now)
        self.counters.output_tokens += 1
        stops = sampled.token in seq.end_ids and seq.num_output > seq.params.min_tokens
        reason = None
        if stops:
            reason = FinishReason.STOP
        elif len(seq.tokens) >= seq.max_len:
            reason = FinishReason.LENGTH
        if reason:
            self._end(seq, reason, now)
            self.output_lengths.record(seq.num_output)
        timing = seq.timing if reason or not seq.timing_sent else None
        seq.timing_sent = True
        return SeqDelta(
            request_id=seq.request.request_id,
            index=seq.index,
            tokens=[sampled.token],
            logprobs=[] if sampled.logprob is None else [sampled.logprob],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=sampled.token if stops else None,
            timing=timing,
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
        if seq not in self._busy:
            self.blocks.give_back(seq)
        samples = self._samples[seq.request.request_id]
        if all(s.state is SeqState.FINISHED for s in samples):
            del self._samples[seq.request.request_id]
            self._request_ends.append(now)

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
        )

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running sequences are not touched. Returns the blocks set free."""
        return self.pool.drop_cached()

    def check_integrity(self) -> None:
        """Raise PoolCorrupted unless every block and every sequence is where it must be."""
        ended_in_flight = [seq for seq in self._busy if seq.state is SeqState.FINISHED]
        self.blocks.check_integrity([*self.running, *ended_in_flight])
        for seq in self.running:
            if seq.state is not SeqState.RUNNING or not seq.num_computed < len(seq.tokens):
                raise PoolCorrupted(f"{seq.name} runs as {seq.state}, {seq.num_computed} tokens computed")
        for seq in self.waiting:
            if seq.state is not SeqState.WAITING or seq.block_table or seq.num_computed:
                raise PoolCorrupted(f"{seq.name} waits as {seq.state} with blocks {seq.block_table}")
        placed = {*self.running, *self.waiting}
        for samples in self._samples.values():
            for seq in samples:
                awaits_prompt = seq.index > 0 and not samples[0].num_output
                if seq not in placed and seq.state is not SeqState.FINISHED and not awaits_prompt:
                    raise PoolCorrupted(f"{seq.name} was accepted and is nowhere")

    def _retry_after_s(self) -> float:
        """How long the queue takes at the recent pace."""
        least_s, most_s = RETRY_AFTER_RANGE_S
        if len(self._request_ends) < 2:
            return least_s
        s_per_request = (self._request_ends[-1] - self._request_ends[0]) / (len(self._request_ends) - 1)
        return min(most_s, max(least_s, s_per_request * len(self.waiting)))


def _slots(seq: Sequence) -> int:
    """Places it takes among the running: until its prompt is done, those of its siblings too."""
    return 1 if seq.num_output else seq.params.n


def _owes_prompt_logprobs(seq: Sequence) -> bool:
    return seq.params.prompt_logprobs is not None and seq.prompt_logprobs_sent < seq.prompt_len - 1
