"""The choice of experts: scores of all experts, the best few per token, and their weights.

`route` starts from router logits, one program per token. `route_few` starts from the hidden states of a few
tokens: its programs share out the router's rows, and the last one to finish makes the choice, so that a
decode step needs one launch. Nothing is read back, and equal scores go to the smaller expert.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs

MOST_FEW = 4  # tokens of `route_few`
Scores = Literal["softmax", "sigmoid"]


def route(
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    scores: Scores = "softmax",
    normalized: bool = True,
    scale: float = 1.0,
    choice_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """logits [T, E] → chosen [T, per_token] int32 and weights float32, best first, as `reference.route`.

    counts [E] int64: each chosen expert's is raised by 1, for tokens whose slot [T] int32 is not negative.
    """
    tokens, experts = logits.shape
    if tokens == 0:
        return
    _require(chosen, weights, experts, groups)
    _route_kernel[(tokens,)](
        logits,
        choice_bias,
        chosen,
        weights,
        counts,
        slots,
        scale,
        **_constants(chosen, experts, scores, normalized, groups, top_groups),
        PDL=PDL,
        num_warps=1 if experts <= 256 else 4,
        **pdl_options(),
    )


def route_few(
    x: Tensor,
    router: Tensor,
    chosen: Tensor,
    weights: Tensor,
    logits: Tensor,
    counter: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    normed: Tensor | None = None,
    router_bias: Tensor | None = None,
    scores: Scores = "softmax",
    normalized: bool = True,
    scale: float = 1.0,
    choice_bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """x [T, hidden] and router [E, hidden] → logits [T, E] in x's dtype, and the choice as `route`.

    For up to MOST_FEW tokens. `counter` [1] int32 is 0 between launches. norm_weight [hidden] float32: x is
    first RMS-normed; the result is written to `normed` [T, hidden], rounded, and used here unrounded.
    """
    tokens, hidden = x.shape
    experts = router.shape[0]
    assert (norm_weight is None) == (normed is None), "a norm needs its weight and a place for its result"
    assert 1 <= tokens <= MOST_FEW, f"{tokens} tokens: use linear and route for more than {MOST_FEW}"
    _require(chosen, weights, experts, groups)
    block_k = min(2048, max(128, triton.next_power_of_2(hidden)))
    _route_few_kernel[(experts,)](
        x,
        router,
        norm_weight,
        normed,
        router_bias,
        choice_bias,
        logits,
        chosen,
        weights,
        counts,
        slots,
        counter,
        tokens,
        scale,
        eps,
        HIDDEN=hidden,
        TOKENS=triton.next_power_of_2(tokens),
        BLOCK_N=1,
        BLOCK_K=block_k,
        SLICE=triton.next_power_of_2(triton.cdiv(hidden, experts)),
        **_constants(chosen, experts, scores, normalized, groups, top_groups),
        PDL=PDL,
        num_warps=1 if experts <= 256 else 4,  # reductions within one warp are the fastest
        **pdl_options(),
    )


def _require(chosen: Tensor, weights: Tensor, experts: int, groups: int) -> None:
    assert chosen.dtype == torch.int32, "chosen experts are int32"
    assert weights.dtype == torch.float32, "the weights of experts are float32"
    assert chosen.shape == weights.shape, "each chosen expert has a weight"
    assert chosen.shape[1] <= experts, f"a token cannot use {chosen.shape[1]} of {experts} experts"
    assert experts % groups == 0, f"{experts} experts are not {groups} groups of one size"


def _constants(
    chosen: Tensor, experts: int, scores: Scores, normalized: bool, groups: int, top_groups: int
) -> dict[str, object]:
    return {
        "E": experts,
        "PER_TOKEN": chosen.shape[1],
        "SIGMOID": scores == "sigmoid",
        "NORMALIZED": normalized,
        "GROUPS": groups,
        "TOP_GROUPS": top_groups,
    }


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    logits, choice_bias, chosen, weights, counts, slots, scale,
    E: tl.constexpr, PER_TOKEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, triton.next_power_of_2(E))
    values = tl.load(logits + token * E + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    _choose(
        values, choice_bias, chosen + token * PER_TOKEN, weights + token * PER_TOKEN,
        counts, slots, token, scale,
        E, PER_TOKEN, SIGMOID, NORMALIZED, GROUPS, TOP_GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "scale", "eps"])
def _route_few_kernel(
    x, router, norm_weight, normed, router_bias, choice_bias, logits, chosen, weights, counts, slots, counter,
    tokens, scale, eps,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    E: tl.constexpr, PER_TOKEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_K)
    row_at = router + rows.to(tl.int64)[:, None, None] * HIDDEN + columns[None, None, :]
    x_at = x + token[None, :, None] * HIDDEN + columns[None, None, :]
    inside = (columns < HIDDEN)[None, None, :]
    w = tl.load(row_at, mask=(rows < E)[:, None, None] & inside, other=0.0)
    if norm_weight is not None:
        gains = tl.load(norm_weight + columns, mask=columns < HIDDEN, other=0.0)[None, None, :]
        mine = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
        my_gains = tl.load(norm_weight + mine, mask=mine < HIDDEN, other=0.0)[None, :]
    wait_for_inputs(PDL)
    some = (token < tokens)[None, :, None]
    acts = tl.load(x_at, mask=some & inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        own_at = token[:, None] * HIDDEN + mine[None, :]
        written = (token < tokens)[:, None] & (mine < HIDDEN)[None, :]
        own = tl.load(x + own_at, mask=written, other=0.0).to(tl.float32)
        squares = acts * acts
        acts *= gains
    sums = tl.sum(w.to(tl.float32) * acts, 2)
    for start in tl.static_range(BLOCK_K, HIDDEN, BLOCK_K):
        inside = (columns + start < HIDDEN)[None, None, :]
        w = tl.load(row_at + start, mask=(rows < E)[:, None, None] & inside, other=0.0)
        acts = tl.load(x_at + start, mask=some & inside, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += acts * acts
            gains = tl.load(norm_weight + columns + start, mask=columns + start < HIDDEN, other=0.0)
            acts *= gains[None, None, :]
        sums += tl.sum(w.to(tl.float32) * acts, 2)
    if norm_weight is not None:
        root = tl.rsqrt(tl.sum(squares, 2) / HIDDEN + eps)
        sums *= root
        result = own * tl.reshape(root, (TOKENS, 1)) * my_gains
        tl.store(normed + own_at, result.to(normed.dtype.element_ty), mask=written)
    if router_bias is not None:
        sums += tl.load(router_bias + rows, mask=rows < E, other=0.0).to(tl.float32)[:, None]
    mask = (rows < E)[:, None] & (token < tokens)[None, :]
    tl.store(logits + token[None, :] * E + rows[:, None], sums.to(logits.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # all threads' stores before the one thread's release
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        expert = tl.arange(0, triton.next_power_of_2(E))
        for one in range(tokens):
            # .cg: written by other multiprocessors in this launch, so the L1 cache must be bypassed.
            at = logits + one * E + expert
            values = tl.load(at, mask=expert < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
            _choose(
                values, choice_bias, chosen + one * PER_TOKEN, weights + one * PER_TOKEN,
                counts, slots, one, scale,
                E, PER_TOKEN, SIGMOID, NORMALIZED, GROUPS, TOP_GROUPS,
            )  # fmt: skip


@triton.jit
def _choose(
    logits, choice_bias, chosen_at, weights_at, counts, slots, token, scale,
    E: tl.constexpr, PER_TOKEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Choose PER_TOKEN experts of one token: the best again and again, each time without those taken.

    Whatever the logits are, the choice is PER_TOKEN different experts below E: they are used as addresses.
    """
    expert = tl.arange(0, triton.next_power_of_2(E))
    PLAIN: tl.constexpr = choice_bias is None and GROUPS == 1
    values, choice = _scored(logits, choice_bias, expert, E, SIGMOID, GROUPS, TOP_GROUPS)
    slot = tl.arange(0, triton.next_power_of_2(PER_TOKEN))
    taken = tl.zeros(slot.shape, tl.int32)
    shares = tl.zeros(slot.shape, tl.float32)
    for place in tl.static_range(PER_TOKEN):
        best, found = tl.max(choice, 0, return_indices=True)  # of equal ones the first
        share = best if PLAIN else tl.sum(tl.where(expert == found, values, 0.0), 0)
        choice = tl.where(expert == found, float("-inf"), choice)
        taken = tl.where(slot == place, found, taken)
        shares = tl.where(slot == place, share, shares)
    if NORMALIZED:
        shares = shares / tl.sum(shares, 0)
    tl.store(chosen_at + slot, taken, mask=slot < PER_TOKEN)
    tl.store(weights_at + slot, shares * scale, mask=slot < PER_TOKEN)
    if counts is not None:
        live = (slot < PER_TOKEN) & (tl.load(slots + token) >= 0)  # padding is not counted
        tl.atomic_add(counts + taken, tl.full(slot.shape, 1, tl.int64), mask=live, sem="relaxed")


@triton.jit
def _scored(
    logits, choice_bias, expert,
    E: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Scores of all experts, and the same for the choice: finite, and -inf beyond the last expert."""
    if SIGMOID:
        values = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        values = powers / tl.sum(powers, 0)
    choice = values
    if choice_bias is not None:
        choice += tl.load(choice_bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    if GROUPS > 1:
        choice = _within_best_groups(choice, expert, E, GROUPS, TOP_GROUPS)
    finite = tl.where(choice > -3e38, choice, -3e38)  # NaN as well
    return values, tl.where(expert < E, finite, float("-inf"))


@triton.jit
def _within_best_groups(choice, expert, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """-inf for experts outside the best groups; a group is as good as its two best experts together."""
    SIZE: tl.constexpr = E // GROUPS
    group = expert // SIZE
    each = tl.arange(0, triton.next_power_of_2(GROUPS))
    totals = tl.full(each.shape, float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        mine = tl.where(group == number, choice, float("-inf"))
        total = tl.max(mine, 0)
        if SIZE > 1:
            first = tl.min(tl.where(mine == total, expert, E - 1), 0)
            total += tl.max(tl.where(expert == first, float("-inf"), mine), 0)
        totals = tl.where(each == number, total, totals)
    free = each < GROUPS
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(free, totals, float("-inf")), 0)
        found = tl.min(tl.where(free & (totals == best), each, GROUPS - 1), 0)
        free = free & (each != found)
        kept = kept | (group == found)
    return tl.where(kept, choice, float("-inf"))
