"""A step's inputs made on the device: tokens from host or row, slots from the tables, differences applied."""

from __future__ import annotations

import torch

from ridgeline.ops.cuda.prepare_step import apply_diffs, prepare_step

BLOCK_SIZE = 16


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_differences_reach_their_places_and_no_other(device: str) -> None:
    tables = torch.full((5, 70), -7, dtype=torch.int32, device=device)
    expected = tables.clone()
    places = torch.randperm(350)[:300]
    blocks = torch.randint(0, 1000, (300,), dtype=torch.int32)
    expected.view(-1)[places.to(device)] = blocks.to(device)
    staged = ints([99] * 32 + places.tolist() + blocks.tolist() + [99] * 8, device)
    apply_diffs(staged, 32, 300, tables)
    assert torch.equal(tables, expected)
    apply_diffs(staged, 0, 0, tables)
    assert torch.equal(tables, expected)


def test_tokens_positions_and_slots_of_a_step(device: str) -> None:
    """From the host, from the row's newest sample, from a sample that came to nothing; and padding."""
    tables = torch.randint(0, 1 << 20, (6, 9), dtype=torch.int32, device=device)
    last_tokens = ints([40, 41, -1, 43, 44, 45], device)
    tokens = [7, -1, -1, 9, 0, 0]
    positions = [0, 17, 143, 16, 0, 0]
    rows = [3, 1, 2, 3, -1, -1]
    stride = 16
    staged = torch.full((3 * stride,), 1 << 30, dtype=torch.int32, device=device)
    for section, values in enumerate((tokens, positions, rows)):
        staged[section * stride : section * stride + len(values)] = ints(values, device)
    token_ids, where, slots = (torch.full((8,), -9, dtype=torch.int32, device=device) for _ in range(3))
    prepare_step(staged, 6, stride, tables, last_tokens, token_ids, where, slots, BLOCK_SIZE)
    assert token_ids.tolist() == [7, 41, 0, 9, 0, 0, -9, -9]
    assert where.tolist() == [*positions, -9, -9]
    expected = [
        int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in zip(rows[:4], positions[:4], strict=True)
    ]
    assert slots.tolist() == [*expected, -1, -1, -9, -9]


def test_more_tokens_than_one_program_has(device: str) -> None:
    count, stride = 601, 608
    tables = torch.arange(4 * 200, dtype=torch.int32, device=device).view(4, 200)
    staged = torch.zeros(3 * stride, dtype=torch.int32, device=device)
    staged[:count] = torch.arange(count, dtype=torch.int32, device=device)
    staged[stride : stride + count] = torch.arange(count, dtype=torch.int32, device=device)
    staged[2 * stride :] = 2
    token_ids, positions, slots = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(3))
    prepare_step(
        staged, count, stride, tables, ints([0] * 4, device), token_ids, positions, slots, BLOCK_SIZE
    )
    at = torch.arange(count, dtype=torch.int32, device=device)
    assert torch.equal(token_ids, at)
    assert torch.equal(positions, at)
    assert torch.equal(slots, tables[2][at.long() // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
