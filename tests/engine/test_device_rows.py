"""Which row of the device a sequence has; what is sent makes the device's tables equal the host's."""

from __future__ import annotations

import random

from ridgeline.engine.run.cuda.rows import DeviceRows
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence

WIDTH = 8


def sequence(name: str = "a") -> Sequence:
    request = Request(name, [1, 2, 3], SamplingParams())
    return Sequence(request, index=0, tokens=[1, 2, 3], prompt_len=3, max_len=64, seed=0)


def device_table(rows: DeviceRows, device: dict[int, int], seq: Sequence, length: int) -> list[int]:
    """The differences applied to what the device has; then the sequence's table there."""
    places, blocks = rows.take_differences()
    assert len(places) == len(set(places)), "a place is named twice"
    device.update(zip(places, blocks, strict=True))
    base = rows.index_of(seq) * WIDTH
    return [device[base + place] for place in range(length)]


def test_a_new_row_is_sent_whole_and_then_only_what_grew():
    rows, seq = DeviceRows(4, WIDTH), sequence()
    row = rows.take(seq)
    rows.note_blocks(row, [7, 5])
    base = row.index * WIDTH
    assert rows.take_differences() == ([base, base + 1], [7, 5])
    rows.note_blocks(row, [7, 5])
    assert rows.take_differences() == ([], [])
    rows.note_blocks(row, [7, 5, 9])
    assert rows.take_differences() == ([base + 2], [9])


def test_a_last_block_that_was_copied_on_write_is_sent_again():
    rows, seq = DeviceRows(4, WIDTH), sequence()
    row = rows.take(seq)
    rows.note_blocks(row, [7, 5])
    rows.take_differences()
    rows.note_blocks(row, [7, 6])
    assert rows.take_differences() == ([row.index * WIDTH + 1], [6])
    rows.note_blocks(row, [7, 8, 9])
    assert rows.take_differences() == ([row.index * WIDTH + 1, row.index * WIDTH + 2], [8, 9])


def test_a_row_of_its_own_for_everyone_and_the_freed_one_for_the_next():
    rows = DeviceRows(2, WIDTH)
    one, other = sequence("a"), sequence("b")
    first, second = rows.take(one), rows.take(other)
    assert {first.index, second.index} == {0, 1}
    assert len(rows) == 2
    rows.note_blocks(first, [3])
    rows.take_differences()
    rows.release(one)
    rows.release(one)  # an unknown sequence is ignored
    assert rows.of(one) is None
    third = sequence("c")
    taken = rows.take(third)
    assert taken.index == first.index
    rows.note_blocks(taken, [3])  # the same block, but the device's copy was dropped with the row
    assert rows.take_differences() == ([taken.index * WIDTH], [3])


def test_the_devices_tables_follow_those_of_the_host():
    """Tables grow, replace their last block, and restart after a preemption, as in the scheduler."""
    rng = random.Random(0)
    rows, device = DeviceRows(3, WIDTH), dict[int, int]()
    sequences = [sequence(str(number)) for number in range(3)]
    for _ in range(500):
        seq = rng.choice(sequences)
        row = rows.of(seq) or rows.take(seq)
        change = rng.random()
        if change < 0.1:
            rows.release(seq)
            seq.block_table = []
            continue
        if change < 0.3 and seq.block_table:
            seq.block_table[-1] = rng.randrange(100)
        grown = rng.randrange(3)
        seq.block_table += [rng.randrange(100) for _ in range(min(grown, WIDTH - len(seq.block_table)))]
        if seq.block_table:
            rows.note_blocks(row, seq.block_table)
            assert device_table(rows, device, seq, len(seq.block_table)) == seq.block_table
