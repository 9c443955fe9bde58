"""Shared by the sampling kernels: reading a row's logits and parameters, and numbers that sort like them."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.cuda.sampling.state import ADJUSTED, FIELDS, FLAGS, MIN_TOKENS

NO_KEY = tl.constexpr(-(1 << 63))  # below every key
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def int_field(settings, row, FIELD: tl.constexpr):
    return tl.load(settings + row * FIELDS + FIELD)


@triton.jit
def float_field(settings, row, FIELD: tl.constexpr):
    return tl.load(settings + row * FIELDS + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def is_adjusted(settings, row, position):
    """Whether the row's logits are changed at this output position."""
    changed = (int_field(settings, row, FLAGS) & ADJUSTED) != 0
    return changed | (position < int_field(settings, row, MIN_TOKENS))


@triton.jit
def logits_at(source, changed, token, mask, is_changed, ANY_CHANGED: tl.constexpr):
    """The row's logits as float32, from `changed` where they were adjusted; -inf where masked."""
    if ANY_CHANGED:
        value = tl.load(source + token, mask=mask & (is_changed == 0), other=float("-inf")).to(tl.float32)
        adjusted = tl.load(changed + token, mask=mask & is_changed, other=float("-inf"))
        return tl.where(is_changed, adjusted, value)
    else:
        return tl.load(source + token, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def ordered(value):
    """An int32 that sorts as the float32 does."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_ordered(bits):
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sort_key(value, token):
    """One int64 that sorts by value, and among equals the lower token above."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(key):
    return value_of_ordered((key >> 32).to(tl.int32))
