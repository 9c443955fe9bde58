"""Consistency check of the scheduler: every sequence and every block is in exactly one place.

Run by the engine when it idles, and by tests after every step. It changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable

from ridgeline.engine.kv.block_pool import PoolCorrupted
from ridgeline.engine.kv.sequence_blocks import SequenceBlocks
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.service_order import ServiceOrder
from ridgeline.engine.schedule.step import StepPlan


def integrity_pieces(
    blocks: SequenceBlocks,
    running: ServiceOrder,
    waiting: ServiceOrder,
    draining: Collection[Sequence],
    in_flight: Iterable[StepPlan],
    requests: Iterable[list[Sequence]],
) -> Generator[None, None, bool]:
    """Raise PoolCorrupted if an invariant is broken; a generator, so that work can come in between. Returns
    False, without a verdict, if something changed meanwhile.

    draining: finished, while steps in flight still write their blocks
    requests: the samples of each request that has a live one
    """
    if not (yield from blocks.integrity_pieces([*running, *draining])):
        return False
    blocks.check_sequences([*running, *draining])
    for seq in running:
        ahead = seq.num_computed + seq.in_flight - seq.drafted
        length = len(seq.tokens) + seq.pending
        if seq.state is not SeqState.RUNNING or not ahead < length:
            raise PoolCorrupted(
                f"{seq.name} is running in state {seq.state}, {ahead} of {length} tokens computed"
            )
    for seq in waiting:
        if seq.state is not SeqState.WAITING or seq.block_table or seq.num_computed:
            raise PoolCorrupted(f"{seq.name} is queued in state {seq.state} with blocks {seq.block_table}")
    _check_flights({*running, *waiting, *draining}, draining, in_flight)
    placed = {*running, *waiting}
    for samples in requests:
        for seq in samples:
            awaits_prompt = seq.index > 0 and not samples[0].num_output
            if seq not in placed and seq.state is not SeqState.FINISHED and not awaits_prompt:
                raise PoolCorrupted(f"{seq.name} was accepted but is not in any list")
    return True


def _check_flights(
    known: set[Sequence], draining: Collection[Sequence], in_flight: Iterable[StepPlan]
) -> None:
    """Check each sequence's in-flight counters against the steps in flight."""
    tokens, samples, steps = Counter[Sequence](), Counter[Sequence](), Counter[Sequence]()
    drafted = Counter[Sequence]()
    for plan in in_flight:
        for row in plan.rows:
            tokens[row.seq] += row.count
            samples[row.seq] += bool(row.samplers)
            drafted[row.seq] += len(row.drafts)
            steps.update({row.seq, *row.samplers})
    for seq in {*known, *steps}:
        if (seq.in_flight, seq.pending, seq.steps_in_flight) != (tokens[seq], samples[seq], steps[seq]):
            raise PoolCorrupted(
                f"{seq.name} records {seq.in_flight} tokens, {seq.pending} samples and "
                f"{seq.steps_in_flight} steps in flight; the plans have "
                f"{tokens[seq]}, {samples[seq]} and {steps[seq]}"
            )
        if seq.drafted != drafted[seq]:
            raise PoolCorrupted(f"{seq.name} records {seq.drafted} drafts; the plans have {drafted[seq]}")
        if (seq in draining) != (seq.state is SeqState.FINISHED):
            raise PoolCorrupted(f"{seq.name} is {seq.state} and {'' if seq in draining else 'not '}draining")
