"""StepInputs packs rows as its docstring says."""

from ridgeline.ops.inputs import InputRow, StepInputs


def test_rows_are_packed_with_their_slots_positions_and_logit_indices() -> None:
    inputs = StepInputs.from_rows(
        [
            InputRow([5, 6, 7], start=3, block_table=[9, 2], logits_from=2),
            InputRow([8], start=0, block_table=[1], logits_from=None),
            InputRow([1, 2], start=0, block_table=[3, 4, 7], logits_from=0),
        ],
        block_size=4,
    )
    assert inputs.token_ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert inputs.positions.tolist() == [3, 4, 5, 0, 0, 1]
    assert inputs.slots.tolist() == [39, 8, 9, 4, 12, 13]
    assert inputs.query_starts.tolist() == [0, 3, 4, 6]
    assert inputs.context_lens.tolist() == [6, 1, 2]
    assert inputs.block_tables.tolist() == [[9, 2, 0], [1, 0, 0], [3, 4, 7]]
    assert inputs.logit_rows.tolist() == [2, 4, 5]
