"""A plan's rows as the native library takes them."""

import numpy as np
import pytest

from ridgeline.engine.native_runner import step_arrays
from ridgeline.engine.request import Request, SamplingParams, Sequence
from ridgeline.engine.step import StepRow
from ridgeline.engine.torch_runner import input_row
from ridgeline.ops.inputs import StepInputs


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    request = Request("r", tokens, SamplingParams())
    return Sequence(request, 0, tokens, len(tokens), len(tokens) + 1, 0, block_table=blocks)


def decode(length: int, blocks: list[int]) -> StepRow:
    seq = sequence(list(range(100, 100 + length)), blocks)
    return StepRow(seq, length - 1, 1, (seq,))


def chunk(
    start: int, count: int, blocks: list[int], *, samples: bool = False, scores: bool = False
) -> StepRow:
    seq = sequence(list(range(200, 200 + start + count)), blocks)
    return StepRow(seq, start, count, (seq,) if samples else (), prompt_logprobs=scores)


ROWS = {
    "one decode": [decode(5, [3])],
    "decodes": [decode(5, [3]), decode(40, [1, 9, 4]), decode(17, [2, 7])],
    "a first token alone": [chunk(0, 1, [6], samples=True), decode(3, [5])],
    "a chunk that does not sample": [chunk(16, 20, [4, 5, 8])],
    "mixed": [decode(33, [9, 2, 1]), chunk(0, 30, [7, 3]), chunk(7, 9, [5], samples=True), decode(2, [8])],
    "scored prompt": [chunk(4, 6, [1], samples=True, scores=True), decode(20, [2, 6])],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_arrays_are_those_of_the_reference(rows):
    ours = step_arrays(rows)
    theirs = StepInputs.from_rows([input_row(row) for row in rows], block_size=16)
    for name in ("token_ids", "positions", "query_starts", "block_tables", "logit_rows"):
        array = getattr(ours, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, getattr(theirs, name).numpy(), err_msg=name)
