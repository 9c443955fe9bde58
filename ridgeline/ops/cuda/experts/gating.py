"""What joins an expert's gate and up, as a part of the kernels that compute both."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.cuda.activation import activate


@triton.jit
def gated(gate, up, clamp, dtype: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr):
    """act(gate) · up in float32 of float32 sums, which are rounded to dtype first, as in ops/reference."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, clamp)
        up = tl.maximum(tl.minimum(up, clamp), -clamp)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
