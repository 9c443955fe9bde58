"""The specification of every op, in plain torch: what is computed, not how fast.

Backends (see `backend`) must agree with these on random inputs within the tolerance each docstring states.
T = tokens of the step, R = rows (sequences), H = query heads, K = KV heads, D = head size. Weight matrices
are [out, in]. A layer's KV cache is [2, num_blocks, block_size, K, D]: keys, then values. Tolerances are
for float32, relative to the largest magnitude of the result.
"""

from __future__ import annotations

from collections.abc import Callable
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[..., n] → [..., n] in x's dtype: (x - mean) / sqrt(variance + eps) · weight + bias, in float32.

    `weight` and `bias` [n] are float32. Tolerance 1e-6.
    """
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


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
    chunked: bool


def plan_attention(inputs: StepInputs, window: int | None, chunked: bool = False) -> AttentionPlan:
    """Made once per step and window, read by every layer. Backends add what they precompute."""
    return AttentionPlan(inputs, window, chunked)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, D] → [T, H, D]: causal attention of each token over its own sequence's cached keys and values.

    The step's own keys and values must have been written. Query head h reads KV head h // (H / K). A token
    sees itself and the tokens before it; with a window of w, itself and the w - 1 tokens before; with chunks
    of w, those whose position has the same quotient by w. Scores are q · k · scale, with softcap c then
    c · tanh(score / c); softmax in float32. `sinks` [H]: a further score that takes part in the softmax and
    has no value. Slots outside a row's context are never read: they may contain anything, NaN included.
    Tolerance 1e-5.
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
        at, of = inputs.positions[begin:end, None], torch.arange(context, device=q.device)
        visible = at >= of
        if plan.window is not None:
            visible &= at // plan.window == of // plan.window if plan.chunked else at - of < plan.window
        scores = torch.where(visible, scores, -torch.inf)
        if sinks is not None:
            more = sinks.float()[:, None, None].expand(-1, len(at), 1)
            weights = torch.cat([scores, more], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # `linear`, or one that also looks at its inputs


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise; "gelu" is exact, "gelu_tanh" its approximation."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Activation,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    product: Product = linear,
) -> Tensor:
    """[T, hidden] → [T, hidden]: down(act(up(x))). Tolerance 1e-5."""
    return product(activate(product(x, up, up_bias), activation), down, down_bias)


def gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    product: Product = linear,
) -> Tensor:
    """[T, hidden] → [T, hidden]: down(act(gate(x)) · up(x)).

    `gate_up` [2 · ffn, hidden] is the gate's matrix above the up projection's. Tolerance 1e-5.
    """
    gate, up = product(x, gate_up, gate_up_bias).chunk(2, dim=-1)
    return product(activate(gate, activation) * up, down, down_bias)


def route(
    logits: Tensor,
    per_token: int,
    *,
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax",
    normalized: bool = True,
    scale: float = 1.0,
    choice_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """[T, E] → the chosen experts [T, per_token] and their weights in float32, best first.

    Scores are taken over all experts. sparsemixer: see `sparsemixer`; the options besides `margin` do not
    apply. `choice_bias` [E] is added for the choice alone. With groups only
    experts of the best `top_groups` groups are chosen; a group is as good as its two best experts together.
    Of equal scores the expert with the smaller number is chosen. Weights: exact up to 1e-6.
    """
    wide = logits.float()
    if scores == "sparsemixer":
        return sparsemixer(wide, per_token, margin)
    values = wide.softmax(dim=-1) if scores == "softmax" else wide.sigmoid()
    choice = values if choice_bias is None else values + choice_bias.float()
    if groups > 1:
        by_group = choice.view(len(choice), groups, -1)
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(top_groups, dim=-1).indices, 1.0)
        choice = by_group.masked_fill(kept[..., None] == 0, -torch.inf).view_as(choice)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :per_token]
    weights = values.gather(1, chosen)
    if normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights * scale


def sparsemixer(logits: Tensor, per_token: int, margin: float) -> tuple[Tensor, Tensor]:
    """As `route`: the best expert, then the best of the others, each with its share of a separate softmax.

    The softmax is over the experts that are left and near the best of them: with its logit m, those of logit
    s where (m - s) / max(|s|, m) is at most `margin`.
    """
    left, chosen, weights = logits, [], []
    for _ in range(per_token):
        best, index = left.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > margin
        shares = left.masked_fill(far, -torch.inf).softmax(dim=-1)
        chosen.append(index)
        weights.append(shares.gather(1, index))
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(chosen, dim=1), torch.cat(weights, dim=1)


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    scales_input: bool = False,
    product: Product = linear,
) -> Tensor:
    """[T, hidden] → [T, hidden]: Σ weight · expert(x) over a token's chosen experts, summed in float32.

    `gate_up` [E, 2 · size, hidden], `down` [E, hidden, size], biases [E, …]. With a clamp c the product is
    g · sigmoid(1.702 · g) · (u + 1), g = min(gate, c), u = up within ±c. scales_input: the weight multiplies
    an expert's input instead of its output. Tolerance 1e-5.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        share = weights[tokens, places, None]
        rows = x[tokens]
        if scales_input:
            rows = (rows.float() * share).to(x.dtype)
        both = product(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        gate, up = both.chunk(2, dim=-1)
        if clamp is None:
            inner = activate(gate, activation) * up
        else:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        result = product(inner, down[expert], None if down_bias is None else down_bias[expert]).float()
        out.index_add_(0, tokens, result if scales_input else result * share)
    return out.to(x.dtype)


def _row_slots(inputs: StepInputs, row: int, context: int) -> Tensor:
    """[context] cache slots of the row's tokens, in order."""
    positions = torch.arange(context, device=inputs.slots.device)
    blocks = inputs.block_tables[row, positions // inputs.block_size]
    return blocks * inputs.block_size + positions % inputs.block_size
