"""The buffers that a forward pass on the device writes, allocated once: a step never runs out of memory for
them, and a graph's addresses never change. `cuda_workspace` predicts their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda_workspace import gated_size, low_scratch_sizes, ungated_size
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.ops.cuda.attention.decode_combine import DecodeScratch, decode_scratch
from ridgeline.ops.cuda.attention.decode_config import decode_splits
from ridgeline.ops.cuda.attention.gather_kv import PrefillScratch, gather_scratch_tokens, make_prefill_scratch
from ridgeline.ops.cuda.attention.shared_prefix import prefix_parts
from ridgeline.ops.cuda.experts.scratch import ExpertsScratch, experts_scratch
from ridgeline.ops.cuda.linear.linear import MOST_SPLIT, branch_splits
from ridgeline.ops.cuda.low_bits.products import LowScratch

NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Buffers:
    """T = most tokens of a step, L = most rows of logits, h = hidden, F = ffn; in the model's dtype."""

    residual: Tensor  # [T, h]
    normed: Tensor  # [T + L, h]: more than T rows if a prompt is both scored and sampled
    qkv: Tensor  # [T, (H + 2K) · D]
    q: Tensor  # [T, H · D]: rotated queries, for prefill
    attended: Tensor  # [T, H · D]
    branch: Tensor  # [T, h]: output of attention or MLP, added to the residual
    gate_up: Tensor  # [T, 2F]; empty if no layer has a gate
    gated: Tensor  # [T, F]
    logits: Tensor  # [L, vocab]
    partials: Tensor  # flat float32: split-K sums
    decode: DecodeScratch
    prefill: PrefillScratch
    experts: ExpertsScratch | None = None
    shared: Tensor = NOTHING  # [T, h]: output of shared experts
    shared_scale: Tensor = NOTHING  # [T, 1]
    low: LowScratch | None = None  # for matrices in 8 and 4 bits

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        logit_rows: int,
        max_context: int,
        low: LowBitPlan = NOTHING_LOW,
    ) -> Buffers:
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            residual=empty(tokens, spec.hidden_size),
            normed=empty(tokens + logit_rows, spec.hidden_size),
            qkv=empty(tokens, (heads + 2 * kv_heads) * head_dim),
            q=empty(tokens, heads * head_dim),
            attended=empty(tokens, heads * head_dim),
            branch=empty(tokens, spec.hidden_size),
            gate_up=empty(tokens, 2 * gated_size(spec)),
            gated=empty(tokens, spec.ffn_size),
            logits=empty(logit_rows, spec.vocab_size),
            partials=torch.empty(_partial_sums(spec), dtype=torch.float32, device=device),
            decode=decode_scratch(
                logit_rows, heads, kv_heads, head_dim, _parts(logit_rows, heads, kv_heads), device
            ),
            prefill=make_prefill_scratch(
                gather_scratch_tokens(tokens, max_context), kv_heads, head_dim, dtype, device
            ),
            low=LowScratch.empty(low_scratch_sizes(spec, low, tokens), dtype, device)
            if low.formats
            else None,
            **_for_experts(spec, dtype, device, tokens),
        )


def part_of(buffer: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] at the beginning of a buffer that is wider where layers differ in size."""
    return buffer.flatten()[: rows * width].view(rows, width)


def _for_experts(spec: ModelSpec, dtype: torch.dtype, device: torch.device, tokens: int) -> dict[str, Any]:
    """One scratch is large enough for the experts of every layer."""
    kinds = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)}
    if not kinds:
        return {}
    num, size = max(ffn.num for ffn in kinds), max(ffn.size for ffn in kinds)
    per_token = max(ffn.per_token for ffn in kinds)
    made: dict[str, Any] = {
        "experts": experts_scratch(tokens, num, per_token, spec.hidden_size, size, dtype, device)
    }
    if any(ffn.shared_size for ffn in kinds):
        made["shared"] = torch.empty((tokens, spec.hidden_size), dtype=dtype, device=device)
        made["shared_scale"] = torch.empty((tokens, 1), dtype=dtype, device=device)
    return made


def _parts(most_rows: int, heads: int, kv_heads: int) -> int:
    """Parts per row that scratch memory is allocated for: small batches have more parts but fewer rows."""
    return max(
        -(-rows * (decode_splits(rows, kv_heads) + prefix_parts(rows, heads, kv_heads)) // most_rows)
        for rows in range(1, most_rows + 1)
    )


def _partial_sums(spec: ModelSpec) -> int:
    """Elements of the largest split product of any decode batch."""
    heads = spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    shapes = [(qkv, spec.hidden_size), (spec.hidden_size, heads), (spec.hidden_size, spec.ffn_size)]
    if ungated_size(spec):
        shapes.append((ungated_size(spec), spec.hidden_size))
    return max(branch_splits(rows, n, k) * rows * n for rows in range(1, MOST_SPLIT + 1) for n, k in shapes)
