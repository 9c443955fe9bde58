"""Admission: decides whether the sequence at the head of the queue fits. Built for each step with a queue.

It counts slots, the blocks available now, and the blocks needed at the forecast's peak. The scheduler calls
it and acts on the answer; nothing here changes a sequence or a block.
"""

from __future__ import annotations

from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.schedule.forecast import Claim, OutputLengths, peak_blocks
from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.engine.schedule.request import Sequence


class Admission:
    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: SequenceBlocks,
        output_lengths: OutputLengths,
        running: list[Sequence],
        preemptible: list[Sequence],
        num_draining_blocks: int,
    ) -> None:
        """running: the sequences a candidate joins; the forecast counts only these. A copy, extended here
        preemptible: running sequences that are preempted when their slots or blocks are needed, last one
        first
        num_draining_blocks: held by finished sequences until the step in flight has landed
        """
        self._limits = limits
        self._blocks = blocks
        self._pool = blocks.pool
        self._output_lengths = output_lengths
        self._running = running
        self.preemptible = preemptible
        self._slots_taken = sum(map(_slots, running))
        self._most_blocks = num_draining_blocks + sum(map(self._most_blocks_of, running))
        # Computed on first use: hashes of blocks being computed, and the running sequences' claims with the
        # blocks that only they hold.
        self._computing: set[bytes] | None = None
        self._running_claims: list[Claim] | None = None
        self._own_blocks = 0

    def hits(self, seq: Sequence) -> list[int] | None:
        """The cached blocks `seq` can start from; None if it must wait even after every preemption."""
        if self._slots_taken + _slots(seq) > self._limits.max_running:
            return None
        # At least one token is left to compute: logits are not cached.
        usable = seq.prompt_logprobs_sent if seq.owes_prompt_logprobs else len(seq.tokens) - 1
        hits = self._blocks.cached_prefix(seq, usable)
        if not self.preemptible and not self.fits_now(seq, hits):
            return None
        if self._running and not self._fits_to_the_end(seq, hits):
            return None
        return hits

    def fits_now(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether slots and blocks are free now, with the preemptible sequences still running."""
        if self._slots_taken + sum(map(_slots, self.preemptible)) + _slots(seq) > self._limits.max_running:
            return False
        return self._blocks.num_missing(seq, hits) + self._blocks.num_idle(hits) <= self._pool.available

    def remove_victim(self) -> None:
        """The last preemptible sequence was preempted."""
        self.preemptible.pop()
        self._running_claims = None

    def awaits_prefix(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether a running sequence is computing most of the prefix that `seq` needs.

        It is cached a step or two later. Computing it twice would use slots and blocks and save no time.
        """
        size, least = self._limits.block_size, self._limits.awaited_tokens
        missing = seq.block_hashes[len(hits) : (len(seq.tokens) - 1) // size]
        if len(missing) * size < least or seq.owes_prompt_logprobs:
            return False
        if self._computing is None:
            self._computing = set()
            for other in self._running:
                self._computing.update(other.block_hashes[other.num_computed // size :])
        computing = next((i for i, name in enumerate(missing) if name not in self._computing), len(missing))
        return computing * size >= least and 2 * computing >= len(missing)

    def admitted(self, seq: Sequence, hits: list[int]) -> None:
        """`seq` was admitted and has its blocks."""
        self._running.append(seq)
        if self._computing is not None:
            self._computing.update(seq.block_hashes[len(hits) :])
        self._slots_taken += _slots(seq)
        self._most_blocks += self._most_blocks_of(seq)
        if hits:
            self._running_claims = None  # blocks that one sequence held alone may be shared now
        elif self._running_claims is not None:
            self._running_claims += self._claims(seq, 0)
            self._own_blocks += len(seq.block_table)

    def _fits_to_the_end(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether the blocks suffice until every running sequence reaches its expected length."""
        if self._most_blocks + self._most_blocks_of(seq) <= self._limits.num_blocks:
            return True  # even at maximum length with nothing shared: no forecast needed
        return self._peak_with(seq, hits) <= self._limits.num_blocks

    def _most_blocks_of(self, seq: Sequence) -> int:
        return _slots(seq) * self._pool.blocks_for(seq.max_len)

    def _peak_with(self, candidate: Sequence, hits: list[int]) -> int:
        """The peak number of held blocks if `candidate` is admitted."""
        if self._running_claims is None:
            self._running_claims = []
            self._own_blocks = sum(len(s.block_table) - self._blocks.num_shared(s) for s in self.preemptible)
            for seq in self._running:
                num_shared = self._blocks.num_shared(seq)
                self._own_blocks += len(seq.block_table) - num_shared
                self._running_claims += self._claims(seq, num_shared)
        claims = self._claims(candidate, len(hits)) + self._running_claims
        shared_blocks = max(0, self._pool.num_held - self._own_blocks) + self._blocks.num_idle(hits)
        return peak_blocks(claims, self._limits.block_size, shared_blocks)

    def _claims(self, seq: Sequence, num_shared: int) -> list[Claim]:
        size, length = self._limits.block_size, len(seq.tokens)
        # Minus one: the KV of the last token is never written.
        growth = self._output_lengths.expected_left(seq.num_output, seq.max_len - length) - 1
        claims = [Claim(length - num_shared * size, growth)]
        return claims + [Claim(length % size, growth)] * (_slots(seq) - 1)


def _slots(seq: Sequence) -> int:
    """Slots `seq` takes. Its siblings' slots are included until the prompt is computed."""
    return 1 if len(seq.tokens) > seq.prompt_len else seq.params.n
