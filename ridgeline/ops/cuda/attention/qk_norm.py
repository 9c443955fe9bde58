"""What some families do to queries and keys before attention: norms over a whole projection, with weights for
each head, or LayerNorm; queries scaled by position. RMSNorm of each head is a part of the attention kernels.

One launch between the QKV product and attention, which then adds no bias and no norm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.norm import sum_of_splits


def norm_queries_keys(
    qkv: Tensor,
    out: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    *,
    num_heads: int,
    num_kv_heads: int,
    whole: bool = False,
    layer_norm: bool = False,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    query_scale: tuple[float, float] | None = None,
) -> None:
    """out [T, (H + 2 K) D] = qkv plus bias, with queries and keys normed. `qkv` may be `out` itself, or the
    partial sums [S, T, (H + 2 K) D].

    whole: over all heads of a token, with weights [H D] and [K D]; otherwise over each head, with weights of
    the same shapes or [D]; without weights there is no norm. Sums are rounded to the dtype of `out` before
    the norm, as in ops/reference. query_scale (weight, every): queries at position p of `positions` [T] are
    then multiplied by 1 + weight · log(1 + ⌊(p + 1) / every⌋).
    """
    rows, width = out.shape
    if rows == 0:
        return
    head_dim = width // (num_heads + 2 * num_kv_heads)
    groups, size = (1, num_heads * head_dim) if whole else (num_heads, head_dim)
    block = triton.next_power_of_2(groups) * triton.next_power_of_2(size)
    splits = qkv.shape[0] if qkv.ndim == 3 else 0
    # Keys and values are copied only if they change.
    parts = 3 if splits or bias is not None else 2 if k_norm is not None else 1
    weight, every = query_scale or (None, None)
    _norm_queries_keys_kernel[(rows, parts)](
        qkv,
        out,
        q_norm,
        k_norm,
        bias,
        None if query_scale is None else positions,
        weight,
        every,
        eps,
        rows,
        SPLITS=splits,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        WHOLE=whole,
        LAYER=layer_norm,
        OWN=q_norm is not None and q_norm.shape[0] > head_dim,
        GROUPS=triton.next_power_of_2(groups),
        BLOCK=triton.next_power_of_2(size),
        PDL=PDL,
        num_warps=max(1, min(16, block // 512)),
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def _norm_queries_keys_kernel(
    qkv, out, q_norm, k_norm, bias, positions, scale_weight, scale_every, eps, rows,
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
    if q_norm is not None:  # noqa: SIM102 - known when compiled
        if part < 2:
            if LAYER:
                x = tl.where(mask, x - (tl.sum(x, axis=1) / size)[:, None], 0.0)
            norm = tl.where(part == 0, q_norm, k_norm)
            weights = tl.load(norm + (within if OWN else within - group * D), mask=mask, other=0.0)
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None] * weights
    if positions is not None:  # noqa: SIM102 - known when compiled
        if part == 0:
            position = tl.maximum(tl.load(positions + token), 0).to(tl.float32)
            scale = 1.0 + scale_weight * tl.log(1.0 + tl.floor((position + 1.0) / scale_every))
            x = x.to(dtype).to(tl.float32) * scale
    tl.store(out + token * WIDTH + at, x.to(dtype), mask=mask)
