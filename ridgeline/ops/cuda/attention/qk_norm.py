"""The norms of queries and keys that no program of attention can compute alone: over a whole projection, with
weights for each head, or LayerNorm. RMSNorm of each head is a part of the attention kernels instead.

One launch between the QKV product and attention, which then adds no bias and has no norm of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.norm import sum_of_splits


def norm_queries_keys(
    qkv: Tensor,
    out: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    *,
    num_heads: int,
    num_kv_heads: int,
    whole: bool = False,
    layer_norm: bool = False,
    bias: Tensor | None = None,
) -> None:
    """out [T, (H + 2 K) D] = qkv plus bias, with queries and keys normed. `qkv` may be `out` itself, or the
    partial sums [S, T, (H + 2 K) D].

    whole: over all heads of a token, with weights [H D] and [K D]; otherwise over each head, with weights of
    the same shapes or [D]. Sums are rounded to the dtype of `out` before the norm, as in ops/reference.
    """
    rows, width = out.shape
    if rows == 0:
        return
    head_dim = width // (num_heads + 2 * num_kv_heads)
    groups, size = (1, num_heads * head_dim) if whole else (num_heads, head_dim)
    block = triton.next_power_of_2(groups) * triton.next_power_of_2(size)
    splits = qkv.shape[0] if qkv.ndim == 3 else 0
    parts = 3 if splits or bias is not None else 2  # values are copied only if they change
    _norm_queries_keys_kernel[(rows, parts)](
        qkv,
        out,
        q_norm,
        k_norm,
        bias,
        eps,
        rows,
        SPLITS=splits,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        WHOLE=whole,
        LAYER=layer_norm,
        OWN=q_norm.shape[0] > head_dim,
        GROUPS=triton.next_power_of_2(groups),
        BLOCK=triton.next_power_of_2(size),
        PDL=PDL,
        num_warps=max(1, min(16, block // 512)),
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["rows"])
def _norm_queries_keys_kernel(
    qkv, out, q_norm, k_norm, bias, eps, rows,
    SPLITS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr,
    LAYER: tl.constexpr, OWN: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has the queries, the keys or the values of a token, as rows that are normed separately."""
    let_next_start(PDL)
    WIDTH: tl.constexpr = (H + 2 * K) * D
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heads = tl.where(part == 0, H, K)
    first = tl.where(part == 0, 0, tl.where(part == 1, H, H + K)) * D
    groups = heads
    size = D
    if WHOLE:
        groups = 1
        size = heads * D
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (group < groups) & (column < size)
    within = group * size + column
    at = first + within
    wait_for_inputs(PDL)
    x = sum_of_splits(qkv + token * WIDTH, at, mask, rows.to(tl.int64) * WIDTH, SPLITS)
    if bias is not None:
        x += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    if part < 2:
        if LAYER:
            x = tl.where(mask, x - (tl.sum(x, axis=1) / size)[:, None], 0.0)
        norm = tl.where(part == 0, q_norm, k_norm)
        weights = tl.load(norm + (within if OWN else within - group * D), mask=mask, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None] * weights
    tl.store(out + token * WIDTH + at, x.to(dtype), mask=mask)
