"""The choice of experts by sparsemixer (Phi-3.5-MoE), from router logits: one program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs


def sparsemixer(
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    margin: float,
    *,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """logits [T, E] → chosen [T, per_token] int32 and weights float32, as `reference.sparsemixer`.

    counts [E] int64: each chosen expert's is raised by 1, for tokens whose slot [T] int32 is not negative.
    """
    tokens, experts = logits.shape
    if tokens == 0:
        return
    _sparsemixer_kernel[(tokens,)](
        logits,
        chosen,
        weights,
        counts,
        slots,
        margin,
        E=experts,
        PER_TOKEN=chosen.shape[1],
        PDL=PDL,
        num_warps=1,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["margin"])
def _sparsemixer_kernel(
    logits, chosen, weights, counts, slots, margin,
    E: tl.constexpr, PER_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Whatever the logits are, the choice is different experts below E: they are used as addresses."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, triton.next_power_of_2(E))
    values = tl.load(logits + token * E + expert, mask=expert < E, other=1.0).to(tl.float32)
    values = tl.where(tl.abs(values) < 3e38, values, -3e38)  # NaN as well
    left = tl.where(expert < E, values, float("-inf"))
    for place in tl.static_range(PER_TOKEN):
        best, found = tl.max(left, 0, return_indices=True)  # of equal ones the first
        near = (best - values) / tl.maximum(tl.abs(values), best) <= margin
        shares = tl.where(near | (expert == found), tl.exp(left - best), 0.0)
        tl.store(chosen + token * PER_TOKEN + place, found)
        tl.store(weights + token * PER_TOKEN + place, 1.0 / tl.sum(shares, 0))
        if counts is not None:
            live = tl.load(slots + token) >= 0  # padding is not counted
            tl.atomic_add(counts + found, live.to(tl.int64), sem="relaxed")
        left = tl.where(expert == found, float("-inf"), left)
