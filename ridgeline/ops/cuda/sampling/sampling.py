"""Sampling tokens on the device: the twin of `ops.sampling`, without a softmax, a sort or a host wait.

`sample` launches one kernel for rows that only draw: the best of logit / temperature - log(noise), which is
the same race as the specification's, with the same noise. Rows that need more get a threshold, changed logits
or log-probabilities from the other modules of this package, before or after. All arithmetic except the
noise's hash is float32: if two scores are within about 1e-5 of each other, another token than the
specification's may win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.sampling.adjust_logits import adjust_logits
from ridgeline.ops.cuda.sampling.filters import FilterScratch, find_thresholds
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers, report_logprobs
from ridgeline.ops.cuda.sampling.state import (
    COUNT_SLOT,
    INVERSE_TEMPERATURE,
    STREAM_HIGH,
    STREAM_LOW,
    SamplePlan,
    SamplerState,
)
from ridgeline.ops.cuda.sampling.values import (
    NO_KEY,
    float_field,
    int_field,
    is_adjusted,
    logits_at,
    sort_key,
    token_of,
    value_of,
)

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
LN2 = tl.constexpr(0.6931471805599453)
_IN_HARDWARE = tl.constexpr(not INTERPRETED)
_BLOCK = 1024
_WARPS = 4
_PROGRAMS = 1056  # programs per batch: 8 for each of 132 multiprocessors


class SampleScratch:
    """Working memory of `sample` for up to `max_rows` rows. Memory that only some batches need is allocated
    on first use, and kept.
    """

    def __init__(self, max_rows: int, vocab: int, device: str | torch.device) -> None:
        self.device = torch.device(device)
        # the current leader of each row, and how many of its programs are done; the draw resets both
        self.best = torch.full((max_rows,), NO_KEY.value, dtype=torch.int64, device=device)
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.filters = FilterScratch(max_rows, vocab, device)
        self._changed = torch.empty(0, dtype=torch.float32, device=device)

    def changed(self, count: int, vocab: int) -> Tensor:
        """[count, vocab] float32 for logits that are adjusted before the draw."""
        if self._changed.numel() < count * vocab:
            self._changed = torch.empty(count * vocab, dtype=torch.float32, device=self.device)
        return self._changed[: count * vocab].view(count, vocab)


def sample(
    logits: Tensor,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    last_tokens: Tensor,
    out_tokens: Tensor,
    scratch: SampleScratch,
    plan: SamplePlan,
    logprobs: LogprobBuffers | None = None,
    masks: Tensor | None = None,
) -> None:
    """Choose a token for each row of logits [L, V] whose sequence is in state row rows[i] (-1: padding).

    draw_positions[i] is how many tokens that sequence has chosen before. The token goes to out_tokens[i], or
    -1 if the logits have no finite maximum, and to last_tokens[rows[i]] (0 instead of -1: it may be read as
    an id before the host knows). Rows that request log-probabilities get them in `logprobs`: those of the
    model itself, before bias, penalties, masks and temperature. With a plain plan this is one launch that a
    CUDA graph may contain. masks: as in `adjust_logits`, for constrained rows.
    """
    changed = None
    if plan.adjusted:
        changed = scratch.changed(*logits.shape)
        adjust_logits(logits, rows, draw_positions, state, changed, masks)
    if plan.filtered:
        find_thresholds(logits, changed, rows, draw_positions, state, scratch.filters)
    draw(logits, rows, draw_positions, state, last_tokens, out_tokens, scratch, plan)
    if plan.logprobs is not None and logprobs is not None:
        report_logprobs(logits, rows, out_tokens, state, logprobs)


def draw(
    logits: Tensor,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    last_tokens: Tensor,
    out_tokens: Tensor,
    scratch: SampleScratch,
    plan: SamplePlan,
    *,
    block: int = _BLOCK,
    warps: int = _WARPS,
    programs: int = _PROGRAMS,
) -> None:
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, block)
    steps = triton.cdiv(blocks, max(1, min(blocks, programs // count)))
    changed = scratch.changed(count, vocab) if plan.adjusted else None
    _draw[(count, triton.cdiv(blocks, steps))](
        logits,
        logits if changed is None else changed,
        scratch.filters.thresholds,
        scratch.filters.tops,
        rows,
        draw_positions,
        state.params,
        last_tokens,
        out_tokens,
        scratch.best,
        scratch.arrived,
        state.counts,
        vocab,
        logits.stride(0),
        0 if changed is None else changed.stride(0),
        steps,
        ANY_CHANGED=plan.adjusted,
        FILTERED=plan.filtered,
        COUNTED=plan.counted,
        BLOCK=block,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


# Neither the number of samples nor the slot of their buffer selects another kernel.
@triton.jit(do_not_specialize=["steps"], do_not_specialize_on_alignment=["out_tokens"])
def _draw(
    logits,
    changed,
    thresholds,
    tops,
    rows,
    positions,
    settings,
    last_tokens,
    out_tokens,
    best,
    arrived,
    counts,
    vocab,
    logits_stride,
    changed_stride,
    steps,
    ANY_CHANGED: tl.constexpr,
    FILTERED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c): the best of part c of row i; the last part of a row to finish writes the token."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i)
    if row >= 0:
        inverse_temperature = float_field(settings, row, INVERSE_TEMPERATURE)
        position = tl.load(positions + i)
        is_changed = is_adjusted(settings, row, position) if ANY_CHANGED else False
        source = logits + i.to(tl.int64) * logits_stride
        work = changed + i.to(tl.int64) * changed_stride
        first = part * steps * BLOCK
        end = tl.minimum(first + steps * BLOCK, vocab)
        leader = tl.full((BLOCK,), float("-inf"), tl.float32)
        leader_token = tl.zeros((BLOCK,), tl.int32)
        if inverse_temperature == 0.0:
            while first < end:
                token = first + tl.arange(0, BLOCK)
                value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
                score = marked_where_bad(value, value)
                leader_token = tl.where(score > leader, token, leader_token)
                leader = tl.where(score > leader, score, leader)
                first += BLOCK
        else:
            start = stream_start(settings, row, position)
            if FILTERED:
                threshold, top = tl.load(thresholds + i), tl.load(tops + i)
            while first < end:
                token = first + tl.arange(0, BLOCK)
                value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
                if FILTERED:
                    score = (value - top) * inverse_temperature - log_noise(start, token)
                    score = tl.where(value >= threshold, score, float("-inf"))
                else:
                    score = value * inverse_temperature - log_noise(start, token)
                score = marked_where_bad(value, score)
                leader_token = tl.where(score > leader, token, leader_token)
                leader = tl.where(score > leader, score, leader)
                first += BLOCK
        tl.atomic_max(best + i, tl.max(sort_key(leader, leader_token)))
        if tl.atomic_add(arrived + i, 1) == tl.num_programs(1) - 1:
            key = tl.atomic_xchg(best + i, NO_KEY)
            tl.store(arrived + i, 0)
            token = token_of(key)
            score = value_of(key)
            # no possible token, or one that is NaN or +inf
            token = tl.where((score == float("-inf")) | (score == float("inf")), -1, token)
            tl.store(out_tokens + i, token)
            tl.store(last_tokens + row, tl.maximum(token, 0))
            if COUNTED:
                slot = int_field(settings, row, COUNT_SLOT)
                if (slot >= 0) & (token >= 0):
                    tl.atomic_add(counts + slot.to(tl.int64) * vocab + token, 1)


@triton.jit
def marked_where_bad(value, score):
    """The score, or +inf if the logit is NaN or +inf: it wins, which marks the row as bad."""
    return tl.where(value < float("inf"), score, float("inf"))


@triton.jit
def stream_start(settings, row, position):
    """The start of the counter for this output position's noise: like `ops.sampling.stream_start`."""
    low = int_field(settings, row, STREAM_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = int_field(settings, row, STREAM_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    return mixed(((high << 32) | low) + position.to(tl.uint64) + GAMMA)


@triton.jit
def mixed(state):
    """SplitMix64's output function."""
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)


@triton.jit
def log_noise(start, token):
    """log(-log(u)) of the token's uniform u = (53 bits + 1/2) / 2^53, also accurate if u is close to 1.

    `part` is u or 1 - u, whichever is below 1/2: both are exact from the bits. -log(1 - x) is x times a
    smooth function of x, so its logarithm needs no special care.
    """
    state = mixed(token.to(tl.uint64) * GAMMA + start)
    above = state.to(tl.int64, bitcast=True) >> 63  # all ones where u is above 1/2
    bits = (state ^ above.to(tl.uint64, bitcast=True)) >> 11
    part = (bits.to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * (1.0 / (1 << 53))
    series = 1.44252286926396 * part - 1.6986657998298884
    series = series * part + 1.2600104301162098
    series = series * part - 0.20453973934989647
    series = series * part + 0.2698501317748971
    series = series * part + 0.242774453109838
    series = series * part + 0.33370255894624284
    series = series * part + 0.49999280541925906
    series = series * part + 1.000000022917583
    noise = tl.where(above != 0, part * series, -LN2 * log2_of(part))
    return LN2 * log2_of(noise)


@triton.jit
def log2_of(value):
    """log2 by the hardware instruction, accurate to 2^-22; the library's takes ten times as many."""
    if _IN_HARDWARE:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [value], tl.float32, True, 1)
    else:
        return tl.log2(value)
