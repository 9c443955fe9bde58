"""A step's integers: parts lie aligned, padded as asked, in a turn that no copy in flight is read from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("torch")

from ridgeline.engine.run.cuda.step_block import ALIGN, StepBlock, aligned

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, ALIGN), (ALIGN, ALIGN), (ALIGN + 1, 2 * ALIGN)])
def test_parts_are_rounded_up_to_64_bytes(count, expected):
    assert aligned(count) == expected
    assert 4 * ALIGN == 64


def test_parts_come_back_as_they_were_put_with_their_padding():
    block = StepBlock(200, CPU)
    block.begin()
    first = block.put([5, 6, 7], room=20, fill=-1)
    second = block.put(np.arange(3, dtype=np.int32))
    third = block.put([])
    assert (first, second, third) == (0, 32, 48)
    block.upload()
    assert block.view(first, 20).tolist() == [5, 6, 7] + [-1] * 17
    assert block.view(second, 3).tolist() == [0, 1, 2]


def test_what_an_earlier_step_left_in_a_turn_is_not_seen_again():
    block = StepBlock(64, CPU)
    for value in range(9):
        block.begin()
        first = block.put([value + 1], room=4)
        block.upload()
        assert block.view(first, 4).tolist() == [value + 1, 0, 0, 0]


def test_each_buffer_of_the_ring_has_separate_memory():
    """Until the copy of a step is done, its numbers must stay: three steps may be under way."""
    block = StepBlock(16, CPU)
    hosts = []
    for value in (1, 2, 3):
        block.begin()
        block.put([value])
        hosts.append(block._hosts[block._slot])
    assert [int(host[0]) for host in hosts] == [1, 2, 3]


def test_what_does_not_fit_is_refused_with_its_size():
    block = StepBlock(40, CPU)
    block.begin()
    block.put([1] * 33)
    with pytest.raises(ValueError, match="the step needs 64 integers; the block holds 48"):
        block.put([1])
