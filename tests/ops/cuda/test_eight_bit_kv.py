"""The 8-bit KV cache: stored as the reference says, bit for bit; attention is that over the stored values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_attention import decode_attention
from ridgeline.ops.cuda.attention.decode_combine import decode_scratch
from ridgeline.ops.cuda.attention.decode_config import DecodeConfig
from ridgeline.ops.cuda.attention.eight_bit_kv import allocate_kv, reference_kv, rope_write_eight
from ridgeline.ops.cuda.attention.gather_kv import make_prefill_scratch
from ridgeline.ops.cuda.attention.prefill_attention import PrefillConfig, prefill_attention
from ridgeline.ops.cuda.attention.prefill_plan import plan_prefill
from ridgeline.ops.cuda.attention.rope_kv import rope_write
from tests.ops.cuda.conftest import assert_close

BLOCK = 16
KINDS = ["fp8", "int8"]
HEADS, KV_HEADS, DIM = 6, 2, 32
KINDS_OF_HEADS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}


def projections(tokens: int, device: str) -> Tensor:
    """Queries, keys and values of tokens, side by side."""
    return torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()


def tables_of_angles(device: str, dim: int = DIM) -> tuple[Tensor, Tensor]:
    angles = torch.arange(256, device=device)[:, None] / 10 ** torch.arange(dim // 2, device=device)
    return angles.cos(), angles.sin()


class Cache:
    """Rows of these lengths in shuffled blocks, written by `rope_write_eight` without a rotation."""

    def __init__(self, kind: str, lengths: list[int], device: str) -> None:
        most = max(-(-length // BLOCK) for length in lengths)
        self.tables = (
            torch.randperm(most * len(lengths), dtype=torch.int32).view(len(lengths), most).to(device)
        )
        shape = (most * len(lengths), KV_HEADS, 2, BLOCK, DIM)
        self.codes, self.steps = allocate_kv(shape, kind, device)
        self.kind, self.lengths = kind, lengths
        self.keys, self.values = [], []
        nothing = torch.empty(256, 0, device=device)
        for row, length in enumerate(lengths):
            place = torch.arange(length, device=device)
            slots = (self.tables[row].long()[place // BLOCK] * BLOCK + place % BLOCK).to(torch.int32)
            qkv = projections(length, device)
            q = torch.empty(length, HEADS, DIM, dtype=torch.bfloat16, device=device)
            rope_write_eight(
                qkv,
                q,
                self.codes,
                self.steps,
                place.to(torch.int32),
                slots,
                nothing,
                nothing,
                **KINDS_OF_HEADS,
            )
            parts = qkv.view(length, -1, DIM)
            assert torch.equal(q, parts[:, :HEADS])
            self.keys.append(parts[:, HEADS : HEADS + KV_HEADS])
            self.values.append(parts[:, HEADS + KV_HEADS :])

    def stored(self, x: Tensor) -> Tensor:
        codes, steps = reference_kv(x, self.kind)
        return (codes.float() * steps[..., None]).repeat_interleave(HEADS // KV_HEADS, 1)

    def attended(
        self, row: int, q: Tensor, position: int, window: int | None, softcap: float | None
    ) -> Tensor:
        """q [H, D] at this position of the row."""
        seen = slice(max(0, position + 1 - (window or position + 1)), position + 1)
        keys, values = (self.stored(x[row][seen]) for x in (self.keys, self.values))
        scores = torch.einsum("hd,thd->ht", q.float(), keys) * DIM**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_stored_as_the_reference_says_whatever_is_written_beside_it(
    kind: str, device: str
) -> None:
    """With norms and a rotation: what `rope_write` stores in 16 bits, rounded."""
    qkv, bias = projections(5, device), torch.randn((HEADS + 2 * KV_HEADS) * DIM, device=device).bfloat16()
    qkv[1] = 0
    positions = torch.tensor([3, 17, 0, 47, 16], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 17, -1, 47, 16], dtype=torch.int32, device=device)
    cos, sin = tables_of_angles(device)
    norms = {name: torch.rand(DIM, device=device) + 0.5 for name in ("q_norm", "k_norm")}
    options = {**KINDS_OF_HEADS, **norms, "bias": bias}
    plain = torch.zeros(3, KV_HEADS, 2, BLOCK, DIM, dtype=torch.bfloat16, device=device)
    q, expected_q = (torch.empty(5, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    rope_write(qkv, expected_q, plain, positions, slots, cos, sin, **options)  # type: ignore[arg-type]
    codes, steps = allocate_kv(tuple(plain.shape), kind, device)
    rope_write_eight(qkv, q, codes, steps, positions, slots, cos, sin, **options)  # type: ignore[arg-type]
    assert torch.equal(q, expected_q)
    expected, expected_steps = reference_kv(plain, kind)
    for slot in slots[slots >= 0].tolist():
        at = slot // BLOCK, slice(None), slice(None), slot % BLOCK
        assert torch.equal(codes[at].view(torch.uint8), expected[at].view(torch.uint8))
        assert torch.equal(steps[at], expected_steps[at])
    assert int((steps != 0).sum()) == 4 * 2 * KV_HEADS  # padding is not stored
    alone, alone_steps = allocate_kv(tuple(plain.shape), kind, device)
    for token in range(5):
        one = slice(token, token + 1)
        rope_write_eight(
            qkv[one], q[one], alone, alone_steps, positions[one], slots[one], cos, sin, **options
        )  # type: ignore[arg-type]
    assert torch.equal(alone.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(alone_steps, steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap", "splits"), [(None, None, 1), (None, 20.0, 3), (20, None, 2)])
def test_decodes_attend_over_the_stored_values(
    kind: str, window: int | None, softcap: float | None, splits: int, device: str
) -> None:
    cache = Cache(kind, [1, 20, 45], device)
    q = torch.randn(4, HEADS, DIM, device=device).bfloat16()
    positions = torch.tensor([0, 19, 44, 0], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 0, 0, -1], dtype=torch.int32, device=device)
    out = torch.full_like(q, float("nan"))
    scratch = decode_scratch(4, HEADS, KV_HEADS, DIM, splits, device)
    angles = tables_of_angles(device)
    decode_attention(
        None, cache.codes, cache.tables, rows, positions, slots, *angles, out, scratch,
        q=q, scale=DIM**-0.5, splits=splits, window=window, softcap=softcap, kv_steps=cache.steps,
        config=DecodeConfig(block_tokens=16, split_tokens=16), **KINDS_OF_HEADS,
    )  # fmt: skip
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    for row, position in enumerate([0, 19, 44]):
        assert_close(out[row], cache.attended(row, q[row], position, window, softcap), torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gathered", [False, True])
def test_prompts_attend_over_the_stored_values(kind: str, gathered: bool, device: str) -> None:
    lengths, fresh = [12, 40], [12, 20]  # the second row's first tokens are cached
    cache = Cache(kind, lengths, device)
    group = HEADS // KV_HEADS
    config = PrefillConfig(16, 16, 4, 2, gathered)
    plan = plan_prefill(fresh, lengths, config.block_m // group, table_rows=[0, 1])
    views = plan.device_views(torch.from_numpy(plan.pack()).to(device))
    q = torch.randn(sum(fresh), HEADS, DIM, device=device).bfloat16()
    out = torch.full_like(q, float("nan"))
    scratch = make_prefill_scratch(512, KV_HEADS, DIM, torch.bfloat16, device)
    prefill_attention(
        q, cache.codes, cache.tables, views, out, scratch,
        scale=DIM**-0.5, config=config, kv_steps=cache.steps,
    )  # fmt: skip
    at = 0
    for row, (count, length) in enumerate(zip(fresh, lengths, strict=True)):
        for position in range(length - count, length):
            assert_close(out[at], cache.attended(row, q[at], position, None, None), torch.bfloat16)
            at += 1
