"""The 8-bit KV cache: stored as the reference says, bit for bit; attention is that over the stored values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_combine import decode_scratch
from ridgeline.ops.cuda.attention.eight_bit_kv import allocate_kv, decode_attention, reference_kv, write_kv
from tests.ops.cuda.conftest import assert_close

BLOCK = 16
KINDS = ["fp8", "int8"]


def filled(kind: str, lengths: list[int], kv_heads: int, head_dim: int, device: str) -> tuple[Tensor, ...]:
    """A cache with rows of these lengths in shuffled blocks: (codes, scales, tables, keys, values)."""
    most = max(-(-length // BLOCK) for length in lengths)
    blocks = most * len(lengths)
    tables = torch.randperm(blocks, dtype=torch.int32).view(len(lengths), most).to(device)
    codes, scales = allocate_kv(blocks, kv_heads, BLOCK, head_dim, kind, device)
    kept = []
    for row, length in enumerate(lengths):
        place = torch.arange(length, device=device)
        slots = tables[row].long()[place // BLOCK] * BLOCK + place % BLOCK
        keys, values = (
            torch.randn(length, kv_heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        write_kv(keys, values, codes, scales, slots.to(torch.int32))
        kept.append((keys, values))
    return codes, scales, tables, [pair[0] for pair in kept], [pair[1] for pair in kept]  # type: ignore[return-value]


def values_of(x: Tensor, kind: str) -> Tensor:
    codes, scales = reference_kv(x, kind)
    return codes.float() * scales[..., None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_stored_as_the_reference_says_whatever_is_written_beside_it(
    kind: str, device: str
) -> None:
    keys = torch.randn(5, 2, 40, device=device, dtype=torch.bfloat16)
    values = torch.randn(5, 2, 40, device=device, dtype=torch.bfloat16) * 30
    keys[1, 0] = 0
    slots = torch.tensor([3, 17, -1, 47, 16], dtype=torch.int32, device=device)
    codes, scales = allocate_kv(3, 2, BLOCK, 40, kind, device)
    write_kv(keys, values, codes, scales, slots)
    for part, x in enumerate((keys, values)):
        expected, steps = reference_kv(x, kind)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, place = divmod(slot, BLOCK)
                found = codes[block, :, part, place].view(torch.uint8)
                assert torch.equal(found, expected[token].view(torch.uint8))
                assert torch.equal(scales[block, :, part, place], steps[token])
    assert int((scales != 0).sum()) == 4 * 2 * 2  # padding is not stored
    alone, alone_scales = allocate_kv(3, 2, BLOCK, 40, kind, device)
    for token in range(5):
        one = slice(token, token + 1)
        write_kv(keys[one].contiguous(), values[one].contiguous(), alone, alone_scales, slots[one])
    assert torch.equal(alone.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap", "splits"), [(None, None, 1), (None, 20.0, 3), (40, None, 2)])
def test_decode_attention_is_that_over_the_stored_values(
    kind: str, window: int | None, softcap: float | None, splits: int, device: str
) -> None:
    lengths, heads, kv_heads, head_dim = [1, 37, 90], 6, 2, 40
    codes, scales, tables, keys, values = filled(kind, lengths, kv_heads, head_dim, device)
    q = torch.randn(4, heads, head_dim, device=device, dtype=torch.bfloat16)
    positions = torch.tensor([length - 1 for length in lengths] + [-1], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=device)
    out = torch.full_like(q, float("nan"))
    scratch = decode_scratch(4, heads, kv_heads, head_dim, splits, device)
    options = {"scale": head_dim**-0.5, "splits": splits, "window": window, "softcap": softcap}
    more = {"block_tokens": 16, "least_tiles": 1}
    decode_attention(q, codes, scales, tables, rows, positions, out, scratch, **options, **more)
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    assert int(scratch.counters.abs().sum()) == 0
    for row, length in enumerate(lengths):
        first = max(0, length - (window or length))
        k, v = (
            values_of(x[row], kind)[first:].repeat_interleave(heads // kv_heads, 1) for x in (keys, values)
        )
        scores = torch.einsum("hd,thd->ht", q[row].float(), k) * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        assert_close(out[row], expected, torch.bfloat16)
