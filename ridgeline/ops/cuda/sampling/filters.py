"""min-p, top-k and top-p as one number per row: the smallest logit that may be drawn.

The vocabulary is split into small groups. At least k logits reach the k-th best of the groups' maxima, so the
few that do are gathered and sorted, and they decide. If they are too many or have too little weight,
`bisection` searches the whole row. Weights are summed in float32: top-p decides as the specification does
unless the sum at its edge is within about 1e-6 of the requested share.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.sampling.bisection import bisected_threshold
from ridgeline.ops.cuda.sampling.state import (
    FILTERED,
    FLAGS,
    INVERSE_TEMPERATURE,
    MIN_P_GAP,
    TOP_K,
    TOP_P,
    SamplerState,
)
from ridgeline.ops.cuda.sampling.values import (
    LOG2_E,
    float_field,
    int_field,
    is_adjusted,
    logits_at,
    ordered,
    value_of_ordered,
)

# Bits below which logits of a dtype never differ as float32: a search can skip them.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_GROUPS = 32  # in each part of a row


class FilterScratch:
    """Working memory of `find_thresholds` and its results: thresholds [max_rows] and tops [max_rows].

    part: tokens per program; candidates: the most candidates of a row that are sorted.
    """

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        device: str | torch.device,
        part: int = 4096,
        candidates: int = 1024,
    ) -> None:
        self.part, self.parts = part, triton.cdiv(vocab, part)
        self.deepest = (
            candidates * 2 // 5
        )  # the rank among the maxima: several of a group may reach its bound
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.thresholds = torch.empty(max_rows, **floats)
        self.tops = torch.empty(max_rows, **floats)
        self.maxima = torch.empty(max_rows, self.parts * _GROUPS, **floats)
        self.masses = torch.empty(max_rows, self.parts, 2, **floats)  # the part's best, and Σ exp below it
        self.bounds = torch.empty(max_rows, **floats)  # candidates reach it; +inf: none are needed
        self.totals = torch.empty(max_rows, **floats)  # weight of the whole row, -1: of the candidates
        self.candidates = torch.empty(max_rows, candidates, **floats)
        self.gathered = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.undecided = torch.empty(max_rows, dtype=torch.int32, device=device)


def find_thresholds(
    logits: Tensor,
    changed: Tensor | None,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    scratch: FilterScratch,
) -> None:
    """scratch.thresholds: the smallest logit each row may draw (-inf: any); scratch.tops: its best logit,
    0 for rows without filters. `changed` holds the logits of rows that were adjusted before."""
    count, vocab = logits.shape
    rows_of = (logits, logits if changed is None else changed, rows, draw_positions, state.params)
    strides = (logits.stride(0), 0 if changed is None else changed.stride(0))
    spare_bits = _SPARE_BITS[logits.dtype]
    shared = {"ANY_CHANGED": changed is not None, "PDL": PDL, **pdl_options()}
    results = (scratch.undecided, scratch.tops, scratch.thresholds)
    _survey[(count, scratch.parts)](
        *rows_of,
        *results,
        scratch.maxima,
        scratch.masses,
        scratch.bounds,
        scratch.totals,
        scratch.arrived,
        vocab,
        *strides,
        BLOCK=scratch.part,
        GROUPS=_GROUPS,
        PARTS=triton.next_power_of_2(scratch.parts),
        DEEPEST=scratch.deepest,
        SPARE_BITS=spare_bits,
        num_warps=8,
        **shared,
    )
    _gather[(count, scratch.parts)](
        *rows_of,
        scratch.bounds,
        scratch.candidates,
        scratch.gathered,
        vocab,
        *strides,
        BLOCK=scratch.part,
        CANDIDATES=scratch.candidates.shape[1],
        num_warps=8,
        **shared,
    )
    _settle[(count,)](
        *rows_of,
        *results,
        scratch.totals,
        scratch.candidates,
        scratch.gathered,
        vocab,
        *strides,
        CANDIDATES=scratch.candidates.shape[1],
        SPARE_BITS=spare_bits,
        BLOCK=4096,
        num_warps=16,
        **shared,
    )


@triton.jit
def _survey(
    logits,
    changed,
    rows,
    positions,
    settings,
    undecided,
    tops,
    thresholds,
    maxima,
    masses,
    bounds,
    totals,
    arrived,
    vocab,
    logits_stride,
    changed_stride,
    ANY_CHANGED: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    DEEPEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c): maxima and mass of part c of row i. The last part of a row decides how far down to
    gather, or decides the row at once if that needs no candidates."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    row = tl.load(rows + i)
    if row >= 0:
        if (int_field(settings, row, FLAGS) & FILTERED) == 0:
            if part == 0:
                _decide(i, undecided, tops, thresholds, bounds, 0.0, float("-inf"))
        else:
            is_changed = is_adjusted(settings, row, tl.load(positions + i))
            source = logits + i.to(tl.int64) * logits_stride
            work = changed + i.to(tl.int64) * changed_stride
            token = part * BLOCK + tl.arange(0, BLOCK)
            value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
            scale = float_field(settings, row, INVERSE_TEMPERATURE) * LOG2_E
            group = tl.max(tl.reshape(value, (GROUPS, BLOCK // GROUPS)), axis=1)
            best = tl.max(group)
            base = tl.where(best > float("-inf"), best, 0.0)
            mass = tl.sum(tl.exp2((value - base) * scale))
            place = i * parts + part
            tl.store(maxima + place * GROUPS + tl.arange(0, GROUPS), group)
            tl.store(masses + place * 2, best)
            tl.store(masses + place * 2 + 1, mass)
            tl.debug_barrier()  # all of this part is written before it is reported
            if tl.atomic_add(arrived + i, 1) == parts - 1:
                tl.store(arrived + i, 0)
                lane = tl.arange(0, PARTS * GROUPS)
                best_of = tl.load(
                    maxima + i * parts * GROUPS + lane, mask=lane < parts * GROUPS, other=float("-inf")
                )
                top = tl.max(best_of)
                lane = tl.arange(0, PARTS)
                peak = tl.load(masses + (i * parts + lane) * 2, mask=lane < parts, other=float("-inf"))
                mass_of = tl.load(masses + (i * parts + lane) * 2 + 1, mask=lane < parts, other=0.0)
                if (top > float("-inf")) & (top < float("inf")):
                    gap = float_field(settings, row, MIN_P_GAP)
                    top_k = int_field(settings, row, TOP_K)
                    cut = (top_k > 0) & (top_k < vocab)
                    if cut | (float_field(settings, row, TOP_P) < 1.0):
                        total = tl.sum(
                            tl.where(peak > float("-inf"), mass_of * tl.exp2((peak - top) * scale), 0.0)
                        )
                        spare = tl.where(is_changed, 0, SPARE_BITS) if ANY_CHANGED else SPARE_BITS
                        bound = top + gap
                        if cut | (gap == float("-inf")):
                            rank = tl.where(cut, top_k, DEEPEST)
                            deep = _ranked(best_of, top, rank, spare)
                            bound = tl.maximum(bound, tl.where(rank > DEEPEST, float("-inf"), deep))
                        tl.store(tops + i, top)
                        tl.store(totals + i, tl.where(cut | (gap > float("-inf")), -1.0, total))
                        # no bound: too few groups, or too large a k; nothing is gathered
                        tl.store(undecided + i, 1)
                        tl.store(bounds + i, tl.where(bound > float("-inf"), bound, float("inf")))
                    else:
                        _decide(i, undecided, tops, thresholds, bounds, top, top + gap)
                else:
                    _decide(i, undecided, tops, thresholds, bounds, 0.0, float("-inf"))


@triton.jit
def _decide(i, undecided, tops, thresholds, bounds, top, threshold):
    tl.store(undecided + i, 0)
    tl.store(tops + i, top)
    tl.store(thresholds + i, threshold)
    tl.store(bounds + i, float("inf"))


@triton.jit
def _ranked(values, top, rank, spare):
    """The highest bound that at least `rank` of the values reach; -inf if they are too few."""
    keys = ordered(values) >> spare
    bottom = ordered(tl.full((), float("-inf"), tl.float32)) >> spare
    low, high = bottom, (ordered(top) >> spare) + 1
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        if tl.sum((keys >= middle).to(tl.int32)) >= rank:
            low = middle
        else:
            high = middle
    return tl.where(low > bottom, value_of_ordered(low << spare), float("-inf"))


@triton.jit
def _gather(
    logits,
    changed,
    rows,
    positions,
    settings,
    bounds,
    candidates,
    gathered,
    vocab,
    logits_stride,
    changed_stride,
    ANY_CHANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c) adds the candidates of part c to those of row i, in any order."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row >= 0:
        bound = tl.load(bounds + i)
        if bound < float("inf"):
            is_changed = is_adjusted(settings, row, tl.load(positions + i))
            source = logits + i.to(tl.int64) * logits_stride
            work = changed + i.to(tl.int64) * changed_stride
            token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
            here = value >= bound
            count = tl.sum(here.to(tl.int32))
            if count > 0:
                place = tl.atomic_add(gathered + i, count) + tl.cumsum(here.to(tl.int32), axis=0) - 1
                tl.store(candidates + i * CANDIDATES + place, value, mask=here & (place < CANDIDATES))


@triton.jit
def _settle(
    logits,
    changed,
    rows,
    positions,
    settings,
    undecided,
    tops,
    thresholds,
    totals,
    candidates,
    gathered,
    vocab,
    logits_stride,
    changed_stride,
    ANY_CHANGED: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per undecided row: from its candidates or, if they do not suffice, by bisection."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if (row >= 0) & (tl.load(undecided + i) != 0):
        found = tl.load(gathered + i)
        tl.debug_barrier()  # every warp has read it before one of them clears it
        tl.store(gathered + i, 0)
        top = tl.load(tops + i)
        threshold = tl.full((), float("nan"), tl.float32)
        if (found > 0) & (found <= CANDIDATES):
            lane = tl.arange(0, CANDIDATES)
            value = tl.load(candidates + i * CANDIDATES + lane, mask=lane < found, other=float("-inf"))
            threshold = _threshold_among(value, found, settings, row, top, tl.load(totals + i), CANDIDATES)
        if threshold == threshold:
            tl.store(undecided + i, 0)
        else:
            is_changed = is_adjusted(settings, row, tl.load(positions + i))
            spare = tl.where(is_changed, 0, SPARE_BITS) if ANY_CHANGED else SPARE_BITS
            source = logits + i.to(tl.int64) * logits_stride
            work = changed + i.to(tl.int64) * changed_stride
            threshold = bisected_threshold(
                source, work, is_changed, vocab, settings, row, top, spare, ANY_CHANGED, BLOCK
            )
        tl.store(thresholds + i, threshold)


@triton.jit
def _threshold_among(value, found, settings, row, top, total, CANDIDATES: tl.constexpr):
    """The threshold, from all the candidates; NaN if the nucleus does not end among them."""
    lane = tl.arange(0, CANDIDATES)
    value = tl.sort(value, descending=True)  # any order of arrival: the sums below have one order
    threshold = top + float_field(settings, row, MIN_P_GAP)
    top_k = int_field(settings, row, TOP_K)
    if (top_k > 0) & (top_k <= found):
        threshold = tl.maximum(threshold, tl.max(tl.where(lane == top_k - 1, value, float("-inf"))))
    top_p = float_field(settings, row, TOP_P)
    if top_p < 1.0:
        scale = float_field(settings, row, INVERSE_TEMPERATURE) * LOG2_E
        weight = tl.where((value >= threshold) & (lane < found), tl.exp2((value - top) * scale), 0.0)
        running = tl.cumsum(weight, axis=0)
        whole = total < 0.0  # min-p and top-k leave only candidates
        wanted = top_p * tl.where(whole, tl.max(running), total)
        nucleus = tl.max(tl.where((running >= wanted) & (weight > 0.0), value, float("-inf")))
        threshold = tl.where(whole | (nucleus > float("-inf")), tl.maximum(threshold, nucleus), float("nan"))
    return threshold
