"""The torch backend's attention agrees with the reference loop on random mixed batches."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.ops import reference, torch_backend
from ridgeline.ops.inputs import InputRow, StepInputs

BLOCK_SIZE = 16
# (tokens already cached, tokens of this step): decodes of scattered lengths, chunks, a whole prompt.
MIXED = [(0, 1), (39, 1), (3, 1), (700, 1), (0, 37), (50, 13), (15, 1), (16, 16), (5, 2)]


def random_batch(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, seed: int, kv_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, StepInputs]:
    """Queries, a cache whose unused slots are NaN, and the inputs, with block tables in random order."""
    torch.manual_seed(seed)
    counts = [-(-(start + count) // BLOCK_SIZE) for start, count in rows]
    free = list(range(1, sum(counts) + 8))  # block 0 stays poisoned: it is what tables are padded with
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    inputs = StepInputs.from_rows(
        [
            InputRow([0] * count, start, table, None)
            for (start, count), table in zip(rows, tables, strict=True)
        ],
        BLOCK_SIZE,
    )
    kv = torch.full((2, sum(counts) + 8, BLOCK_SIZE, kv_heads, dim), torch.nan, dtype=kv_dtype)
    for (start, count), table in zip(rows, tables, strict=True):
        for position in range(start + count):
            block, offset = divmod(position, BLOCK_SIZE)
            kv[:, table[block], offset] = torch.randn(2, kv_heads, dim).to(kv_dtype)
    return torch.randn(len(inputs.token_ids), heads, dim), kv, inputs


def both(
    q: torch.Tensor, kv: torch.Tensor, inputs: StepInputs, window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5
    expected = reference.paged_attention(q, kv, reference.plan_attention(inputs, window), scale, softcap)
    plan = torch_backend.plan_attention(inputs, window)
    return torch_backend.paged_attention(q, kv, plan, scale, softcap), expected


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 64, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 6)])
def test_the_fast_twin_agrees_with_the_reference(
    heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None
) -> None:
    q, kv, inputs = random_batch(MIXED, heads, kv_heads, dim, seed=heads, kv_dtype=torch.float32)
    actual, expected = both(q, kv, inputs, window, softcap)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_the_cache_may_be_narrower_than_the_activations(kv_dtype: torch.dtype) -> None:
    q, kv, inputs = random_batch(MIXED, 4, 2, 32, seed=1, kv_dtype=kv_dtype)
    actual, expected = both(q, kv, inputs, None, None)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_poisoned_blocks_never_reach_a_result() -> None:
    q, kv, inputs = random_batch(MIXED, 4, 2, 32, seed=2, kv_dtype=torch.float32)
    assert kv[:, 0].isnan().all()
    for result in both(q, kv, inputs, 33, None):
        assert result.isfinite().all()


def test_a_decode_whose_context_equals_its_head_group_sees_every_key() -> None:
    """Three query heads per KV head over three keys: a square that must not be taken for causal."""
    q, kv, inputs = random_batch([(2, 1)], 3, 1, 16, seed=3, kv_dtype=torch.float32)
    actual, expected = both(q, kv, inputs, None, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_the_reference_is_textbook_attention() -> None:
    """One whole prompt without paging: softmax(q · kᵀ · scale) · v, causal, head by head."""
    q, kv, inputs = random_batch([(0, 20)], 4, 2, 8, seed=4, kv_dtype=torch.float32)
    keys, values = kv.flatten(1, 2)[:, inputs.slots]
    plan = reference.plan_attention(inputs, 5)
    actual = reference.paged_attention(q, kv, plan, 0.25)
    for token in range(20):
        seen = slice(max(0, token - 4), token + 1)
        for head in range(4):
            weights = (keys[seen, head // 2] @ q[token, head] * 0.25).softmax(0)
            torch.testing.assert_close(actual[token, head], weights @ values[seen, head // 2])


def test_written_keys_and_values_are_found_at_their_slots() -> None:
    kv = torch.full((2, 3, 4, 2, 5), torch.nan, dtype=torch.bfloat16)
    keys, values = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    reference.write_kv(keys, values, kv, torch.tensor([9, 4, 0]))
    for token, (block, offset) in enumerate([(2, 1), (1, 0), (0, 0)]):
        assert torch.equal(kv[0, block, offset], keys[token].bfloat16())
        assert torch.equal(kv[1, block, offset], values[token].bfloat16())
    assert int(kv.isnan().sum()) == kv.numel() - 2 * 3 * 2 * 5


def test_decodes_gathered_in_parts_agree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long batch is gathered a few rows at a time, so that its scratch stays small."""
    monkeypatch.setattr(torch_backend, "_GATHERED_TOKENS", 600)
    q, kv, inputs = random_batch([(700, 1), (650, 1), (20, 1), (5, 1), (600, 1)], 4, 2, 16, 0, torch.float32)
    assert len(torch_backend.plan_attention(inputs, None).decodes) > 3
    actual, expected = both(q, kv, inputs, None, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
