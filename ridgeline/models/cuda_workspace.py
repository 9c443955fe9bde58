"""How many bytes the GPU decoder preallocates beside weights and KV cache: arithmetic alone, no torch.

One entry per buffer, as `cuda_decoder` allocates them; the memory plan is made from the sum, before anything
is loaded. Whoever changes a buffer there changes its line here.
"""

from __future__ import annotations

from ridgeline.models.spec import ModelSpec

SPLIT_K_MOST = 8  # partial sums of one linear
SPLIT_K_TOKENS = 256  # steps of more tokens do without
EXTRA_LOGIT_ROWS = 16
GATHER_TOKENS_MOST = 256 * 1024
BLOCK_TOKENS = 16
DECODE_SPLITS_MOST = 32
DECODE_SPLIT_BYTES_MOST = 64 << 20
FLOAT_BYTES, INT_BYTES = 4, 4


def workspace(
    spec: ModelSpec, dtype_bytes: int, step_tokens: int, max_running: int, max_context: int
) -> dict[str, int]:
    """Bytes of every buffer, by name."""
    tokens, rows = max(step_tokens, max_running), max_running
    hidden, ffn, head = spec.hidden_size, spec.ffn_size, spec.head_dim
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * head
    heads = spec.num_heads * head
    gather_tokens = min(max(max_context, tokens) + rows * BLOCK_TOKENS, GATHER_TOKENS_MOST)
    splits = rows * spec.num_heads * DECODE_SPLITS_MOST * (head + 2) * FLOAT_BYTES
    ropes = {layer.rope for layer in spec.layers}
    return {
        "residual": tokens * hidden * dtype_bytes,
        "normed": tokens * hidden * dtype_bytes,
        "branch": tokens * hidden * dtype_bytes,
        "qkv": tokens * qkv * dtype_bytes,
        "q_out": tokens * heads * dtype_bytes,
        "attention": tokens * heads * dtype_bytes,
        "gate_up": tokens * 2 * ffn * dtype_bytes,
        "gated": tokens * ffn * dtype_bytes,
        "partials": SPLIT_K_MOST * min(tokens, SPLIT_K_TOKENS) * max(qkv, hidden) * FLOAT_BYTES,
        "logits": (rows + EXTRA_LOGIT_ROWS) * spec.vocab_size * dtype_bytes,
        "gather": 2 * spec.num_kv_heads * gather_tokens * head * dtype_bytes,
        "splits": min(splits, DECODE_SPLIT_BYTES_MOST),
        "rope": sum(2 * max_context * rope.dim // 2 * FLOAT_BYTES for rope in ropes),
        "tables": rows * -(-max_context // BLOCK_TOKENS) * INT_BYTES,
    }


def workspace_bytes(
    spec: ModelSpec, dtype_bytes: int, step_tokens: int, max_running: int, max_context: int
) -> int:
    return sum(workspace(spec, dtype_bytes, step_tokens, max_running, max_context).values())
