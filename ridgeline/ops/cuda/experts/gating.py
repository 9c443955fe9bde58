"""What joins an expert's gate and up, as a part of the kernels that compute both."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")


def require_activation(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; use one of {', '.join(ACTIVATIONS)}")
    return activation


@triton.jit
def gated(gate, up, clamp, dtype: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr):
    """act(gate) · up in float32 of float32 sums, which are rounded to dtype first, as in ops/reference."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, clamp)
        up = tl.maximum(tl.minimum(up, clamp), -clamp)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    if ACTIVATION == "relu":
        active = tl.maximum(gate, 0.0)
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2·sqrt(2/π)
        active = gate / (1.0 + tl.exp(-inner))  # (1 + tanh(z)) / 2 = sigmoid(2z)
    else:
        active = gate / (1.0 + tl.exp(-gate))
    return active.to(dtype).to(tl.float32) * up
