"""SequenceStates: all live sequences and their changes of state: queued, running, preempted, finished.

The scheduler plans from it and passes it the results of steps, which it applies to their sequences by rows.
It records which sequences wait, run or drain, and the counters. It decides nothing about the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.intake import CompletionRate
from ridgeline.engine.schedule.request import FinishReason, SeqState, Sequence
from ridgeline.engine.schedule.service_order import ServiceOrder
from ridgeline.engine.schedule.step import RowResult, Sampled, SeqDelta, StepRow, TokenLogprob


@dataclass(slots=True)
class Counters:
    """Totals since the start; the names match EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evicted: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    last_step_end: float = 0.0


class SequenceStates:
    def __init__(self, blocks: SequenceBlocks, output_lengths: OutputLengths) -> None:
        self.blocks = blocks
        self.output_lengths = output_lengths
        self.waiting = ServiceOrder()
        self.running = ServiceOrder()
        self.samples: dict[str, list[Sequence]] = {}  # request id → its n sequences, until all have ended
        self.draining: set[Sequence] = set()  # finished, with blocks that a step in flight still writes
        self.retired: list[Sequence] = []  # reported to the runner with the next plan
        self.counters = Counters()
        self.completion_rate = CompletionRate()

    def add(self, samples: list[Sequence]) -> None:
        """Add a request. The first sample computes the prompt for all, so only it is queued."""
        self.samples[samples[0].request.request_id] = samples
        self.waiting.add(samples[0])

    def admit(self, seq: Sequence, hits: list[int], now: float) -> None:
        self.blocks.take(seq, hits)
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.state = SeqState.RUNNING
        seq.has_row = True
        if seq.timing.admitted is None:
            seq.timing.admitted = now
            found = min(seq.num_computed, seq.prompt_len)  # output generated elsewhere may be cached too
            seq.timing.cached_tokens = found
            self.counters.prefix_queries += seq.prompt_len
            self.counters.prefix_hits += found
            self.counters.prefix_evicted += self.blocks.num_evicted_tokens(seq, found)

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence's blocks and queue it again. Tokens no longer cached are recomputed."""
        self.running.remove(seq)
        self._retire(seq)
        seq.num_computed = 0
        seq.state = SeqState.WAITING
        self.waiting.add(seq)
        seq.timing.preemptions += 1
        seq.timing_sent = False
        self.counters.preemptions += 1

    def dependents(self, seq: Sequence) -> tuple[Sequence, ...]:
        """The sequences that depend on `seq`: itself, and its siblings until the prompt is done."""
        return (seq,) if seq.num_output else tuple(self.samples[seq.request.request_id])

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────

    def land(self, row: StepRow) -> None:
        """The row has left flight: it was computed or withdrawn."""
        seq, samplers = row.seq, row.samplers
        seq.in_flight -= row.count
        seq.steps_in_flight -= 1
        if row.drafts:
            seq.drafted = 0
        if samplers:
            seq.pending -= 1
            for sibling in samplers[1:]:
                sibling.steps_in_flight -= 1
                if sibling.state is SeqState.FINISHED:
                    self._finish_draining(sibling)
        if seq.state is SeqState.FINISHED:
            self._finish_draining(seq)

    def apply_row(self, row: StepRow, outcome: RowResult, now: float, deltas: list[SeqDelta]) -> None:
        """Apply the result of a landed row to the sequences that depend on it."""
        seq = row.seq
        if outcome.error is not None:
            deltas += [self.fail(s, FinishReason.ERROR, now, outcome.error) for s in self.dependents(seq)]
            return
        if row.drafts:
            self._apply_verified(row, outcome.samples, now, deltas)
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

    def _apply_verified(
        self, row: StepRow, samples: list[Sampled], now: float, deltas: list[SeqDelta]
    ) -> None:
        """Apply a row with drafts as if each of its tokens had had a step: blocks are named by tokens that
        were drawn, never by drafts."""
        seq, drafted = row.seq, len(row.drafts)
        seq.timing.drafted_tokens += drafted
        seq.timing.accepted_tokens += len(samples) - 1
        for sampled in samples:
            self._advance(seq, 1)
            delta = self._append(seq, sampled, [], now)
            deltas.append(delta._replace(drafted=drafted, accepted=len(samples) - 1) if drafted else delta)
            drafted = 0
            if seq.state is SeqState.FINISHED:
                return
        self.blocks.trim(seq)

    def _advance(self, seq: Sequence, count: int) -> None:
        if seq.num_computed < seq.furthest:  # preempted before
            again = min(seq.num_computed + count, seq.furthest) - seq.num_computed
            seq.timing.recomputed_tokens += again
            self.counters.recomputed_tokens += again
        self.blocks.advance(seq, count)
        if seq.num_computed > seq.furthest:
            seq.furthest = seq.num_computed

    def _complete_prompt(self, row: StepRow) -> None:
        """The prompt's KV is computed: each sibling runs on its own from now on, sharing these blocks."""
        first = row.seq
        self.counters.prompt_tokens += first.prompt_len
        for sibling in row.samplers[1:]:
            self.blocks.fork(first, sibling)
            sibling.furthest = first.furthest
            sibling.prompt_logprobs_sent = first.prompt_logprobs_sent
            sibling.timing.admitted = first.timing.admitted
            sibling.timing.first_prefill = first.timing.first_prefill
            sibling.timing.chunk_times = first.timing.chunk_times[:]
            sibling.timing.cached_tokens = first.timing.cached_tokens
            sibling.state = SeqState.RUNNING
            self.running.add(sibling)

    def _append(
        self, seq: Sequence, sampled: Sampled, prompt_logprobs: list[TokenLogprob], now: float
    ) -> SeqDelta:
        """Append one token. The next step writes its KV."""
        if sampled.error is not None:
            return self.fail(seq, FinishReason.ERROR, now, sampled.error)
        token, complete = sampled.token, False
        if seq.matcher is not None:
            try:
                complete = seq.matcher.advance(token)
            except ValueError as error:
                return self.fail(seq, FinishReason.ERROR, now, str(error))
        if seq.thinking is not None:
            seq.thinking.advance(token)
        seq.tokens.append(token)
        seq.timing.token_times.append(now)
        self.counters.output_tokens += 1
        logprobs = [] if sampled.logprob is None else [sampled.logprob]
        stop_token = reason = None
        if token in seq.end_ids and seq.num_output > seq.params.min_tokens:
            stop_token, reason = token, FinishReason.STOP
        elif complete:
            stop_token, reason = (token if token in seq.end_ids else None), FinishReason.STOP
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

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, seq: Sequence, reason: FinishReason, now: float, error: str | None = None) -> SeqDelta:
        """End a sequence for a reason other than its own tokens."""
        self._end(seq, reason, now, error)
        return SeqDelta(
            seq.request.request_id, seq.index, finish_reason=reason, error=error, timing=seq.timing
        )

    def _end(self, seq: Sequence, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Remove it from its list. Its blocks are released now, or when the step in flight has landed."""
        queued_or_running = self.running if seq.state is SeqState.RUNNING else self.waiting
        if seq in queued_or_running:  # a sibling waiting for its prompt is in neither
            queued_or_running.remove(seq)
        seq.state = SeqState.FINISHED
        seq.finish_reason = reason
        seq.error = error
        seq.timing.end = now
        seq.timing.end_reason = reason.value
        if seq.steps_in_flight:
            self.draining.add(seq)
        else:
            self._retire(seq)
        samples = self.samples[seq.request.request_id]
        if all(s.state is SeqState.FINISHED for s in samples):
            del self.samples[seq.request.request_id]
            if not seq.background:  # the rate is reported to interactive clients only
                self.completion_rate.record(now)

    def _finish_draining(self, seq: Sequence) -> None:
        """Release a sequence that finished in flight, once its last step has landed."""
        if not seq.steps_in_flight:
            self.draining.remove(seq)
            self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        """No step in flight has it any more: release its blocks and report it to the runner."""
        self.blocks.release(seq)
        if seq.has_row:
            seq.has_row = False
            self.retired.append(seq)
