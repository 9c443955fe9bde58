"""FastForwardScheduler: the engine's scheduler, with runs of decode-only steps applied together.

An hour of traffic has hundreds of thousands of steps that only add one token to every running sequence, and
the simulator skips over them. `decode_run` counts them. `take_run` leaves the same state as that many
iterations of schedule() and apply(): the same block order, index entries and timestamps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """sequences: in service order; iterations: at most; context: Σ KV tokens the first iteration reads.

    With lookahead, an iteration plans one step and applies an older one, as the engine's loop does.
    """

    sequences: list[Sequence]
    iterations: int
    context: int


class FastForwardScheduler(Scheduler):
    """Plans every step as its base does; the two methods below only add the shortcut."""

    def decode_run(self) -> DecodeRun | None:
        """The upcoming steps that only add a token to each running sequence; None if the next one does more.

        Valid until a request is added or aborted, if no token ends a sequence before its maximum length.
        """
        running, limits = self.running.all, self.limits
        if self.budget.is_reduced:  # it may grow within the run
            return None
        may_join = len(running) < min(limits.max_running, limits.step_tokens)
        if not running or len(running) > limits.step_tokens or (self.waiting and may_join):
            return None
        if (
            self._shedding
            or self._sequences.draining
            or running[-1].background
            or self.waiting.has_background
        ):
            return None
        if any([row.seq for row in plan.rows] != running for plan in self._in_flight):
            return None
        if len(self._in_flight) != self.lookahead:
            return None
        return _find_run(running, self.blocks, self.lookahead)

    def take_run(
        self, run: DecodeRun, planned_at: float, applied_at: list[float], token_of: Callable[[Sequence], int]
    ) -> None:
        """Take one iteration of the run per time in `applied_at`; `planned_at`: time of the last plan."""
        iterations = len(applied_at)
        again = _grow_sequences(run, self.blocks, self.lookahead, applied_at, token_of)
        self._preempting = None
        self._interactive_seen = planned_at
        self._sequences.retired = []
        self._num_scheduled += iterations
        for plan in self._in_flight:
            plan.step_id += iterations
            for row in plan.rows:
                row.start += iterations
        counters = self.counters
        counters.steps += iterations
        counters.output_tokens += iterations * len(run.sequences)
        counters.recomputed_tokens += again
        for ended in applied_at:  # added up one by one, as `apply` does: the sum is the same to the last bit
            counters.busy_s += ended - max(self._busy_from, counters.last_step_end)
            counters.last_step_end = ended


def _find_run(sequences: list[Sequence], blocks: SequenceBlocks, steps_in_flight: int) -> DecodeRun | None:
    """The upcoming run of `sequences` (all running ones) if each of them is planned in every iteration.

    It ends before the iteration in which a sequence ends or is not planned, or a block is missing.
    """
    size, pool, context, iterations = blocks.pool.block_size, blocks.pool, 0, sys.maxsize
    starts = []
    for seq in sequences:
        length, start = len(seq.tokens), seq.num_computed + steps_in_flight
        if (
            length != seq.num_computed + 1
            or not seq.in_flight == seq.pending == seq.steps_in_flight == steps_in_flight
            or seq.num_computed < seq.prompt_len
            or len(seq.block_table) != -(-start // size)
            or seq.forks_at >= 0
            or seq.owes_prompt_logprobs
            or seq.is_constrained
        ):
            return None
        iterations = min(iterations, seq.max_len - length - max(steps_in_flight, 1))
        context += start + 1
        starts.append(start)
        if start % size and pool.references(seq.block_table[-1]) > 1:
            return None  # the block would be copied
    iterations = _iterations_with_blocks(starts, iterations, size, pool.available)
    return DecodeRun(sequences, iterations, context) if iterations > 0 else None


def _iterations_with_blocks(starts: list[int], iterations: int, size: int, available: int) -> int:
    """The number of iterations, at most `iterations`, for which there are enough blocks."""
    if len(starts) * (iterations // size + 1) <= available:
        return iterations
    needed = sorted(iteration for start in starts for iteration in range(-start % size, iterations, size))
    return iterations if len(needed) <= available else needed[available]


def _grow_sequences(
    run: DecodeRun,
    blocks: SequenceBlocks,
    steps_in_flight: int,
    applied_at: list[float],
    token_of: Callable[[Sequence], int],
) -> int:
    """Apply the iterations to the sequences and their blocks. Returns the number of recomputed tokens."""
    iterations, size, again = len(applied_at), blocks.pool.block_size, 0
    # Each event is one integer: (iteration, 0 = needs a block or 1 = fills one, position in the order).
    events: list[int] = []
    stride = len(run.sequences)
    end, every = 2 * iterations * stride, 2 * size * stride
    for place, seq in enumerate(run.sequences):
        computed = seq.num_computed
        # The first iteration in which it needs a block, and the first in which it fills one.
        needs, fills = -(computed + steps_in_flight) % size, -(computed + 1) % size
        events += range(2 * needs * stride + place, end, every)
        events += range((2 * fills + 1) * stride + place, end, every)
        seq.tokens.extend(repeat(token_of(seq), iterations))
        seq.timing.token_times.extend(applied_at)
        seq.timing_sent = True
        if computed < seq.furthest:  # preempted before
            lost = min(computed + iterations, seq.furthest) - computed
            seq.timing.recomputed_tokens += lost
            again += lost
        seq.num_computed = computed + iterations
        seq.furthest = max(seq.furthest, seq.num_computed)
    events.sort()
    for event in events:
        iteration_and_kind, place = divmod(event, stride)
        seq = run.sequences[place]
        if iteration_and_kind % 2:
            before = seq.num_computed - iterations
            blocks.fill(seq, (before + iteration_and_kind // 2) // size)
        else:
            blocks.grow(seq)
    return again
