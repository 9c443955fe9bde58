"""The physical limit of a run: each step's bytes over read bandwidth or FLOPs over matmul rate, summed.

Both ceilings were measured on the card: a sum over 2 GiB, and a product of random 8192 × 8192 bf16 matrices.
"""

from __future__ import annotations

from typing import Any

from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.ffn import Experts

READ_BYTES_PER_S = 4.27e12
FLOPS_PER_S = 791e12
BYTES = 2  # bf16


def limit_seconds(spec: Any, records: list[Any], shared_tokens: int = 0) -> float:
    """`shared_tokens`: the number of tokens that all decoding sequences share; their KV is read once."""
    return sum(step_limit_seconds(spec, record, shared_tokens) for record in records)


def step_limit_seconds(spec: Any, record: Any, shared_tokens: int = 0) -> float:
    tokens = record.decode_batch + record.prefill_tokens
    samples = record.decode_batch + record.prefill_rows
    decodes = 4 * spec.num_heads * spec.head_dim * spec.num_layers * record.decode_context
    attention = decodes + prompt_attention_flops(spec, record)
    flops = tokens * spec.matmul_flops_per_token + samples * spec.lm_head_flops + attention
    context = record.decode_context - shared_tokens * max(0, record.decode_batch - 1)
    weights = BYTES * (matrices_read(spec, tokens) + spec.vocab_size * spec.hidden_size)
    return max(
        (weights + context * CacheLayout.of(spec, BYTES).token_bytes) / READ_BYTES_PER_S, flops / FLOPS_PER_S
    )


def matrices_read(spec: Any, tokens: int) -> float:
    """Weights of the layers that a step reads: of experts, those that its tokens are expected to choose."""
    return float(spec.matmul_parameters) + sum(
        count * (ffn.expected_distinct(tokens) - ffn.per_token) * ffn.expert_matrix(spec.hidden_size)
        for ffn, count in ((layer.ffn, count) for layer, count in spec.kinds)
        if isinstance(ffn, Experts)
    )


def prompt_attention_flops(spec: Any, record: Any) -> float:
    """Of a chunk's product of queries and context, what lies above the diagonal is not computed."""
    above = record.prefill_tokens**2 / 2 / max(1, record.prefill_rows)
    pairs = max(0.0, record.prefill_context_product - above)
    return float(4 * spec.num_heads * spec.head_dim * spec.num_layers * pairs)
