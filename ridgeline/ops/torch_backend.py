"""The torch backend: the reference ops, with faster twins where attention or op overhead would dominate.

Runs wherever torch runs. Decode rows of similar length share one padded gather and one attention call;
prefill rows go through torch's fused attention one by one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.inputs import StepInputs
from ridgeline.ops.reference import (
    apply_rope,
    embed,
    experts,
    gated_mlp,
    layer_norm,
    linear,
    mlp,
    route,
    write_kv,
)

__all__ = [
    "NAME",
    "apply_rope",
    "embed",
    "experts",
    "gated_mlp",
    "layer_norm",
    "linear",
    "mlp",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "route",
    "write_kv",
]

NAME = "torch"

# Decode rows with fewer tokens than this are padded to one length: calls cost more than the padding.
_SMALL_CONTEXT = 256
# Most keys gathered for one call: 64 rows of 8,192 tokens at once would take a gigabyte of scratch.
_GATHERED_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows of one query each, padded to N keys. mask is None if nothing is padded."""

    queries: Tensor  # [B] indices into the step's tokens
    slots: Tensor  # [B · N]
    mask: Tensor | None  # [B, 1, 1, N]


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row of several queries over N keys. mask is None for a whole prompt: plain causal attention."""

    begin: int
    end: int
    slots: Tensor  # [N]
    mask: Tensor | None  # [end - begin, N]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`scratch`: memory for gathered keys and values, by number of slots, shared by all layers of a step:
    new memory for each layer costs more in page faults than the copy into it."""

    decodes: list[_DecodeGroup]
    prefills: list[_PrefillRow]
    scratch: dict[int, Tensor] = field(default_factory=dict)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like `reference.rms_norm`; one fused call if x is already float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def plan_attention(inputs: StepInputs, window: int | None, chunked: bool = False) -> AttentionPlan:
    """Slots and masks, once per step and window instead of once per layer."""
    starts, contexts = inputs.query_starts.tolist(), inputs.context_lens.tolist()
    groups: defaultdict[int, list[int]] = defaultdict(list)
    prefills = []
    for row, context in enumerate(contexts):
        if starts[row + 1] - starts[row] == 1:
            visible = context - _first_visible(context - 1, window, chunked)
            # By powers of two: padding at most doubles the data read.
            groups[max(visible, _SMALL_CONTEXT).bit_length()].append(row)
        else:
            prefills.append(_prefill_row(inputs, row, starts[row], starts[row + 1], context, window, chunked))
    decodes = [
        _decode_group(inputs, part, window, chunked)
        for bits, rows in groups.items()
        for part in batched(rows, max(1, _GATHERED_TOKENS >> bits))
    ]
    return AttentionPlan(decodes, prefills)


def _first_visible(position: int, window: int | None, chunked: bool) -> int:
    """The first position that the token at `position` sees."""
    if window is None:
        return 0
    return position - position % window if chunked else max(0, position - window + 1)


def batched(rows: list[int], size: int) -> list[list[int]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Like `reference.paged_attention`, within 1e-5 in float32."""
    heads, head_dim = q.shape[1:]
    kv_heads = kv.shape[3]
    out = torch.empty_like(q)
    for group in plan.decodes:
        batch = len(group.queries)
        # The query heads of one KV head become that head's queries, so no key is copied per query head.
        grouped = q[group.queries].view(batch, kv_heads, heads // kv_heads, head_dim)
        k, v = _gather(kv, group.slots, batch, plan.scratch, q.dtype)
        shared = None if sinks is None else sinks.view(kv_heads, -1)
        attended = _attend(grouped, k, v, group.mask, False, scale, softcap, shared)
        out[group.queries] = attended.reshape(batch, heads, head_dim)
    for row in plan.prefills:
        k, v = _gather(kv, row.slots, 1, plan.scratch, q.dtype)
        queries = q[row.begin : row.end].transpose(0, 1)[None]
        shared = None if sinks is None else sinks.view(heads, 1)
        attended = _attend(queries, k, v, row.mask, row.mask is None, scale, softcap, shared)
        out[row.begin : row.end] = attended[0].transpose(0, 1)
    return out


def _gather(
    kv: Tensor, slots: Tensor, batch: int, scratch: dict[int, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values at `slots` [batch · N], each [batch, K, N, D]; valid until the next gather."""
    kv_heads, head_dim = kv.shape[3:]
    # As a matrix: index_select is several times faster over one-dimensional rows than over K × D.
    rows = kv.view(2, -1, kv_heads * head_dim)
    if len(slots) not in scratch:
        scratch[len(slots)] = kv.new_empty(2, len(slots), kv_heads * head_dim)
    gathered = scratch[len(slots)]
    for half in range(2):
        torch.index_select(rows[half], 0, slots, out=gathered[half])
    k, v = gathered.to(dtype).view(2, batch, -1, kv_heads, head_dim).transpose(2, 3)
    return k, v


def _decode_group(inputs: StepInputs, rows: list[int], window: int | None, chunked: bool) -> _DecodeGroup:
    index = torch.tensor(rows, device=inputs.slots.device)
    context = inputs.context_lens[index, None]  # [B, 1]
    if window is None:
        first = torch.zeros_like(context)
    else:
        first = context - 1 - (context - 1) % window if chunked else (context - window).clamp(min=0)
    longest = int((context - first).max())
    positions = first + torch.arange(longest, device=index.device)  # [B, N]
    real = positions < context
    # Padding points at the row's own newest token: a slot that is always written, so masked keys and
    # values are finite whatever the unused blocks contain.
    positions = torch.minimum(positions, context - 1)
    blocks = inputs.block_tables[index].gather(1, positions // inputs.block_size)
    slots = blocks * inputs.block_size + positions % inputs.block_size
    mask = None if bool(real.all()) else real[:, None, None, :]
    return _DecodeGroup(inputs.query_starts[index], slots.flatten(), mask)


def _prefill_row(
    inputs: StepInputs, row: int, begin: int, end: int, context: int, window: int | None, chunked: bool
) -> _PrefillRow:
    start = context - (end - begin)
    first = _first_visible(start, window, chunked)
    keys = torch.arange(first, context, device=inputs.slots.device)
    blocks = inputs.block_tables[row, keys // inputs.block_size]
    slots = blocks * inputs.block_size + keys % inputs.block_size
    if start == 0 and (window is None or window >= context):
        return _PrefillRow(begin, end, slots, None)
    at = inputs.positions[begin:end, None]
    mask = at >= keys
    if window is not None:
        mask &= at // window == keys // window if chunked else at - keys < window
    return _PrefillRow(begin, end, slots, mask)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [B, H, M, D] over k, v [B, K, N, D]; mask is broadcast over heads, True where visible.

    sinks: [H, M] or [H, 1]
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.repeat_interleave(group, dim=1).float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        more = sinks.float()[None, :, :, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores, more], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(group, dim=1).float()).to(q.dtype)
