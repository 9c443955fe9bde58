"""Admission: may the first in the queue join those who run? Made anew for each step in which somebody waits.

It counts places, blocks there are now, and blocks there will be at the worst moment of the forecast. The
scheduler asks and decides; nothing here changes a sequence or a block.
"""

from __future__ import annotations

from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.plan.forecast import Claim, OutputLengths, peak_blocks
from ridgeline.engine.plan.intake import SchedulerLimits
from ridgeline.engine.plan.request import Sequence


class Admission:
    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: SequenceBlocks,
        output_lengths: OutputLengths,
        running: list[Sequence],
        yielding: list[Sequence],
        num_leaving_blocks: int,
    ) -> None:
        """running:  those whom the candidates join: the forecast is made with these alone. A list of our own
        yielding: those who run too and give way when their places or blocks are needed, the last first
        num_leaving_blocks: held by sequences that have ended, until the step in flight has landed
        """
        self._limits = limits
        self._blocks = blocks
        self._pool = blocks.pool
        self._output_lengths = output_lengths
        self._running = running
        self.yielding = yielding
        self._places = sum(map(_places, running))
        self._most_blocks = num_leaving_blocks + sum(map(self._most_blocks_of, running))
        self._coming: set[bytes] | None = None  # blocks that are being computed; made when first needed, too
        self._running_claims: list[Claim] | None = None  # made when first needed,
        self._own_blocks = 0  # with the blocks that they hold alone

    def hits(self, seq: Sequence) -> list[int] | None:
        """The cached blocks it could start from; None: it must wait, whoever gives way."""
        if self._places + _places(seq) > self._limits.max_running:
            return None
        # Something is always left to compute: logits are not cached.
        usable = seq.prompt_logprobs_sent if seq.owes_prompt_logprobs else len(seq.tokens) - 1
        hits = self._blocks.cached_prefix(seq, usable)
        if not self.yielding and not self.fits_now(seq, hits):
            return None
        if self._running and not self._fits_to_the_end(seq, hits):
            return None
        return hits

    def fits_now(self, seq: Sequence, hits: list[int]) -> bool:
        """It has a place beside those who yield too, and its blocks are there."""
        if self._places + sum(map(_places, self.yielding)) + _places(seq) > self._limits.max_running:
            return False
        return self._blocks.num_missing(seq, hits) + self._blocks.num_idle(hits) <= self._pool.available

    def yielded(self) -> None:
        """The last of those who yield has given way."""
        self.yielding.pop()
        self._running_claims = None

    def awaits_prefix(self, seq: Sequence, hits: list[int]) -> bool:
        """Somebody who runs is computing what `seq` would begin with, and that is most of it.

        In a step or two it will be found. Computed again beside, it would take the room of others, and
        nothing would come sooner.
        """
        size, least = self._limits.block_size, self._limits.awaited_tokens
        missing = seq.block_hashes[len(hits) : (len(seq.tokens) - 1) // size]
        if len(missing) * size < least or seq.owes_prompt_logprobs:
            return False
        if self._coming is None:
            self._coming = set()
            for other in self._running:
                self._coming.update(other.block_hashes[other.num_computed // size :])
        coming = next((i for i, name in enumerate(missing) if name not in self._coming), len(missing))
        return coming * size >= least and 2 * coming >= len(missing)

    def joined(self, seq: Sequence, hits: list[int]) -> None:
        """It was admitted, and has its blocks."""
        self._running.append(seq)
        if self._coming is not None:
            self._coming.update(seq.block_hashes[len(hits) :])
        self._places += _places(seq)
        self._most_blocks += self._most_blocks_of(seq)
        if hits:
            self._running_claims = None  # what others held alone may be shared now
        elif self._running_claims is not None:
            self._running_claims += self._claims(seq, 0)
            self._own_blocks += len(seq.block_table)

    def _fits_to_the_end(self, seq: Sequence, hits: list[int]) -> bool:
        """With those who run, as long as each is expected to."""
        if self._most_blocks + self._most_blocks_of(seq) <= self._limits.num_blocks:
            return True  # even at their longest, with nothing shared; so the forecast need not be made
        return self._peak_with(seq, hits) <= self._limits.num_blocks

    def _most_blocks_of(self, seq: Sequence) -> int:
        return _places(seq) * self._pool.blocks_for(seq.max_len)

    def _peak_with(self, candidate: Sequence, hits: list[int]) -> int:
        """The most blocks held at once if `candidate` joins those who run."""
        if self._running_claims is None:
            self._running_claims = []
            self._own_blocks = sum(len(s.block_table) - self._blocks.num_shared(s) for s in self.yielding)
            for seq in self._running:
                num_shared = self._blocks.num_shared(seq)
                self._own_blocks += len(seq.block_table) - num_shared
                self._running_claims += self._claims(seq, num_shared)
        claims = self._claims(candidate, len(hits)) + self._running_claims
        shared_blocks = max(0, self._pool.num_held - self._own_blocks) + self._blocks.num_idle(hits)
        return peak_blocks(claims, self._limits.block_size, shared_blocks)

    def _claims(self, seq: Sequence, num_shared: int) -> list[Claim]:
        size, length = self._limits.block_size, len(seq.tokens)
        # One less: the KV of the last token is never written.
        growth = self._output_lengths.expected_left(seq.num_output, seq.max_len - length) - 1
        claims = [Claim(length - num_shared * size, growth)]
        return claims + [Claim(length % size, growth)] * (_places(seq) - 1)


def _places(seq: Sequence) -> int:
    """Places it takes among the running: until its prompt is done, those of its siblings too."""
    return 1 if len(seq.tokens) > seq.prompt_len else seq.params.n
