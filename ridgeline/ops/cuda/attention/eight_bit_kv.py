"""An 8-bit KV cache on the GPU: what a token's keys and values are stored as, and the kernel that stores
them.

FP8 (E4M3) or int8 codes with a float32 step for each token and KV head, apart for keys and values. What a
token is stored as depends on the token alone, so that a prefix hit equals a miss bit for bit. Attention
multiplies codes in 16 bits: in decodes the step of a key joins its score and that of a value its weight,
softmax is in float32; prompts read keys and values times their steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_heads import head_pairs, norm_pairs, rotated, summed, turns
from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.low_bits.numbers import INTERPRETS, nearest, step_of
from ridgeline.ops.input_rounding import LARGEST

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
STEP_BYTES = 4
_LEAST = 1e-12
_HEADS = 8  # query heads of a program


def allocate_kv(shape: tuple[int, ...], kind: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """shape: [..., blocks, K, 2, block_size, D]. (codes, steps [..., blocks, K, 2, block_size])."""
    codes = torch.zeros(shape, dtype=torch.int8, device=device).view(FORMATS[kind])
    return codes, torch.zeros(shape[:-1], dtype=torch.float32, device=device)


def reference_kv(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(codes, steps) of x [..., D]: the specification of what is stored."""
    largest = LARGEST["int8" if kind == "int8" else "e4m3"]
    steps = x.float().abs().amax(-1).clamp_min(_LEAST) / largest
    divided = (x.float() / steps[..., None]).clamp(-largest, largest)
    return (divided.round() if kind == "int8" else divided).to(FORMATS[kind]), steps


def rope_write_eight(
    qkv: Tensor,
    q_out: Tensor,
    codes: Tensor,
    steps: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
) -> None:
    """As `rope_write`, into codes [blocks, K, 2, block_size, D] and steps [blocks, K, 2, block_size]."""
    rows, head_dim = qkv.shape[-2], codes.shape[-1]
    if rows == 0:
        return
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    is_integer = codes.dtype == torch.int8
    together = min(_HEADS, triton.next_power_of_2(num_heads))
    _write_kernel[(rows, triton.cdiv(num_heads, together) + num_kv_heads)](
        qkv,
        bias,
        q_norm,
        k_norm,
        q_out,
        codes,
        steps,
        positions,
        slots,
        cos,
        sin,
        eps,
        qkv.stride(0) if parts > 1 else 0,
        PARTS=parts,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        HALF=cos.shape[-1],
        BLOCK_SIZE=codes.shape[3],
        HEADS=together,
        INTEGER=is_integer,
        MOST=LARGEST["int8" if is_integer else "e4m3"],
        PDL=PDL,
        num_warps=4 if together * head_dim >= 1024 else 1,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["part_stride"], do_not_specialize_on_alignment=["positions", "slots"])
def _write_kernel(
    x, bias, q_norm, k_norm, q_out, codes, steps, positions, slots, cos, sin, eps, part_stride,
    PARTS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, INTEGER: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has some query heads of a token, or the key and the value of one KV head."""
    let_next_start(PDL)
    dtype: tl.constexpr = q_out.dtype.element_ty
    QUERIES: tl.constexpr = (H + HEADS - 1) // HEADS  # programs
    token = tl.program_id(0)
    part = tl.program_id(1)
    d = tl.arange(0, D_PAD)[None, :]
    row_at = token.to(tl.int64) * ((H + 2 * K) * D)
    wait_for_inputs(PDL)
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    slot = tl.load(slots + token)
    turn = turns(cos + position * HALF, sin + position * HALF, D_PAD, HALF)
    if part < QUERIES:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        weight, partner_weight = norm_pairs(q_norm, D, D_PAD, HALF)
        q, partner = head_pairs(x, bias, row_at, head, head < H, part_stride, PARTS, D, D_PAD, HALF, dtype)
        q = rotated(q, partner, weight, partner_weight, turn[0], turn[1], eps, q_norm is not None, D, dtype)
        tl.store(q_out + token.to(tl.int64) * (H * D) + head * D + d, q, mask=(head < H) & (d < D))
    else:
        one = tl.arange(0, 1)[:, None]
        kv_head = part - QUERIES
        k_weight, k_partner_weight = norm_pairs(k_norm, D, D_PAD, HALF)
        key, key_partner = head_pairs(
            x, bias, row_at, H + kv_head + one, slot >= 0 + one, part_stride, PARTS, D, D_PAD, HALF, dtype
        )
        key = rotated(
            key, key_partner, k_weight, k_partner_weight, turn[0], turn[1], eps, k_norm is not None, D, dtype
        )
        value_at = (H + K + kv_head + one) * D + d
        value = summed(x, bias, row_at + value_at, value_at, part_stride, d < D, PARTS, dtype)
        at = ((tl.maximum(slot, 0) // BLOCK_SIZE).to(tl.int64) * K + kv_head) * (
            2 * BLOCK_SIZE
        ) + slot % BLOCK_SIZE
        _store_row(key.to(tl.float32), codes, steps, at, slot, d, D, INTEGER, MOST)
        _store_row(value, codes, steps, at + BLOCK_SIZE, slot, d, D, INTEGER, MOST)


@triton.jit
def _store_row(values, codes, steps, at, slot, d, D: tl.constexpr, INTEGER: tl.constexpr, MOST: tl.constexpr):
    step = step_of(tl.max(tl.where(d < D, tl.abs(values), 0.0)), MOST)
    number = nearest(values / step, INTEGER, MOST)
    tl.store(codes + at * D + d, number.to(codes.dtype.element_ty), mask=(d < D) & (slot >= 0))
    tl.store(steps + at, step, mask=slot >= 0)


@triton.jit
def in_16_bits(codes, dtype: tl.constexpr):
    """int8 and E4M3 numbers in bfloat16 or float16: exactly."""
    return codes.to(tl.float32).to(dtype) if INTERPRETS else codes.to(dtype)
