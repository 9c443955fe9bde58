"""DecodeRun: coming steps that add a token to every running sequence and do nothing else, taken at once.

An hour of traffic has hundreds of thousands of such steps, and few that decide anything; the simulator leaps
over them. `Scheduler.decode_run` says how many there are, `Scheduler.take_run` leaves everything as so many
turns of schedule() and apply() would have left it: blocks in the same order, names in the index, stamps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.plan.request import Sequence


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """sequences: in the order of service; turns: how many at most; context: Σ KV tokens the first one reads.

    With lookahead, a turn plans one step and applies an older one, as the engine's loop does.
    """

    sequences: list[Sequence]
    turns: int
    context: int


def find_run(sequences: list[Sequence], blocks: SequenceBlocks, steps_in_flight: int) -> DecodeRun | None:
    """The run that `sequences`, all who run, have before them, if they are planned in every turn of it.

    Ends before the turn in which one of them ends or is no longer planned, or a block is missing.
    """
    size, pool, context, turns = blocks.pool.block_size, blocks.pool, 0, sys.maxsize
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
            or seq.matcher is not None
        ):
            return None
        turns = min(turns, seq.max_len - length - max(steps_in_flight, 1))
        context += start + 1
        starts.append(start)
        if start % size and pool.references(seq.block_table[-1]) > 1:
            return None  # it would be copied
    turns = _turns_with_blocks(starts, turns, size, pool.available)
    return DecodeRun(sequences, turns, context) if turns > 0 else None


def _turns_with_blocks(starts: list[int], turns: int, size: int, available: int) -> int:
    """As many of `turns` as there are blocks for."""
    if len(starts) * (turns // size + 1) <= available:
        return turns
    needed = sorted(turn for start in starts for turn in range(-start % size, turns, size))
    return turns if len(needed) <= available else needed[available]


def grow_sequences(
    run: DecodeRun,
    blocks: SequenceBlocks,
    steps_in_flight: int,
    applied_at: list[float],
    token_of: Callable[[Sequence], int],
) -> int:
    """What the turns do to the sequences and their blocks. Returns how many tokens were computed again."""
    turns, size, again = len(applied_at), blocks.pool.block_size, 0
    events: list[int] = []  # (turn, whether a block is filled rather than needed, place in the order), in one
    stride = len(run.sequences)
    end, every = 2 * turns * stride, 2 * size * stride
    for place, seq in enumerate(run.sequences):
        computed = seq.num_computed
        needs, fills = -(computed + steps_in_flight) % size, -(computed + 1) % size  # its first turns to
        events += range(2 * needs * stride + place, end, every)
        events += range((2 * fills + 1) * stride + place, end, every)
        seq.tokens.extend(repeat(token_of(seq), turns))
        seq.timing.token_times.extend(applied_at)
        seq.timing_sent = True
        if computed < seq.furthest:  # it was preempted once
            lost = min(computed + turns, seq.furthest) - computed
            seq.timing.recomputed_tokens += lost
            again += lost
        seq.num_computed = computed + turns
        seq.furthest = max(seq.furthest, seq.num_computed)
    events.sort()
    for event in events:
        turn_and_kind, place = divmod(event, stride)
        seq = run.sequences[place]
        if turn_and_kind % 2:
            before = seq.num_computed - turns
            blocks.fill(seq, (before + turn_and_kind // 2) // size)
        else:
            blocks.grow(seq)
    return again
