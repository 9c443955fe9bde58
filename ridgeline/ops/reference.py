"""The specification of every op, in plain torch: what is computed, not how fast.

Backends (see `backend`) must agree with these on random inputs within the tolerance each docstring states.
T = tokens of the step, R = rows (sequences), H = query heads, K = KV heads, D = head size. Weight matrices
are [out, in]. A layer's KV cache is [2, num_blocks, block_size, K, D]: keys, then values. Tolerances are
for float32, relative to the largest magnitude of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.inputs import StepInputs

NAME = "reference"


def embed(token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """[T] → [T, hidden]: rows of `weight`, times `scale` rounded to the weight's dtype. Exact."""
    rows = F.embedding(token_ids, weight)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, in] → [T, out]: x · weightᵀ + bias. Tolerance 1e-5."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] → [..., n] in x's dtype: x / sqrt(mean(x²) + eps) · weight, computed in float32.

    `weight` [n] is float32 and already contains Gemma's added 1. Tolerance 1e-6.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] → the same, rotated; cos and sin are [T, dim / 2] float32, the tables' rows per token.

    Half-split ("neox") layout: element i is paired with element i + dim / 2. Elements from `dim` on are
    left alone. Computed in float32. Tolerance 1e-6.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(x.dtype) for part in (*rotated, rest)], dim=-1)


def write_kv(keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, K, D] in the cache at `slots` [T], in the cache's dtype. In place; exact."""
    flat = kv.flatten(1, 2)
    flat[0, slots] = keys.to(kv.dtype)
    flat[1, slots] = values.to(kv.dtype)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The data about a step that attention needs; the same for all layers with the same window."""

    inputs: StepInputs
    window: int | None


def plan_attention(inputs: StepInputs, window: int | None) -> AttentionPlan:
    """Made once per step and window, read by every layer. Backends add what they precompute."""
    return AttentionPlan(inputs, window)


def paged_attention(
    q: Tensor, kv: Tensor, plan: AttentionPlan, scale: float, softcap: float | None = None
) -> Tensor:
    """[T, H, D] → [T, H, D]: causal attention of each token over its own sequence's cached keys and values.

    The step's own keys and values must have been written. Query head h reads KV head h // (H / K). A token
    sees itself and the tokens before it; with a window of w, itself and the w - 1 tokens before. Scores
    are q · k · scale, with softcap c then c · tanh(score / c); softmax in float32. Slots outside
    a row's context are never read: they may contain anything, NaN included. Tolerance 1e-5.
    """
    inputs = plan.inputs
    group = q.shape[1] // kv.shape[3]
    starts, contexts = inputs.query_starts.tolist(), inputs.context_lens.tolist()
    out = torch.empty_like(q)
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        slots = _row_slots(inputs, row, context)
        keys, values = kv.flatten(1, 2)[:, slots].float().repeat_interleave(group, dim=2)  # [context, H, D]
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = inputs.positions[begin:end, None] - torch.arange(context, device=q.device)
        visible = distance >= 0
        if plan.window is not None:
            visible &= distance < plan.window
        weights = torch.where(visible, scores, -torch.inf).softmax(dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """[T, hidden] → [T, hidden]: down(act(gate(x)) · up(x)).

    `gate_up` [2 · ffn, hidden] is the gate's matrix above the up projection's. Tolerance 1e-5.
    """
    gate, up = linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return linear(active * up, down, down_bias)


def _row_slots(inputs: StepInputs, row: int, context: int) -> Tensor:
    """[context] cache slots of the row's tokens, in order."""
    positions = torch.arange(context, device=inputs.slots.device)
    blocks = inputs.block_tables[row, positions // inputs.block_size]
    return blocks * inputs.block_size + positions % inputs.block_size
