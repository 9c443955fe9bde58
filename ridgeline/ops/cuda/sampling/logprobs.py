"""Log-probabilities of drawn tokens and the best alternatives, for rows that request them, without a sort.

Each part of a row finds its own best few and its share of the normalizer; one program per row merges them.
They are those of the raw logits. Runs after the draw, because it also counts the chosen token's rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.sampling.state import LOGPROBS, MAX_LOGPROBS, SamplerState
from ridgeline.ops.cuda.sampling.values import LOG2_E, NO_KEY, int_field, sort_key, token_of, value_of

_PART = 4096


class LogprobBuffers:
    """Results on the device, for up to `max_rows` rows of logits; the runner copies them to the host.

    Row i: the chosen token's log-probability and rank (1 = most likely), and its `logprobs` best ids with
    their log-probabilities, best first, equal ones in id order. Rows without a request are not written.
    """

    def __init__(self, max_rows: int, vocab: int, device: str | torch.device) -> None:
        self.logprobs = torch.empty(max_rows, dtype=torch.float32, device=device)
        self.ranks = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.top_ids = torch.empty(max_rows, MAX_LOGPROBS, dtype=torch.int32, device=device)
        self.top_logprobs = torch.empty(max_rows, MAX_LOGPROBS, dtype=torch.float32, device=device)
        parts = triton.cdiv(vocab, _PART)
        self.part_keys = torch.empty(max_rows, parts, MAX_LOGPROBS, dtype=torch.int64, device=device)
        self.part_sums = torch.empty(max_rows, parts, 2, dtype=torch.float32, device=device)  # best, Σ exp
        self.part_ranks = torch.empty(max_rows, parts, dtype=torch.int32, device=device)


def report_logprobs(
    logits: Tensor, rows: Tensor, out_tokens: Tensor, state: SamplerState, out: LogprobBuffers
) -> None:
    """Fill `out` for the rows of logits [L, V] that request them and whose token is not -1."""
    count, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    _part_logprobs[(count, parts)](
        logits,
        rows,
        out_tokens,
        state.params,
        out.part_keys,
        out.part_sums,
        out.part_ranks,
        vocab,
        logits.stride(0),
        MOST=MAX_LOGPROBS,
        BLOCK=_PART,
        PDL=PDL,
        num_warps=8,
        **pdl_options(),
    )
    _merge_logprobs[(count,)](
        logits,
        rows,
        out_tokens,
        state.params,
        out.part_keys,
        out.part_sums,
        out.part_ranks,
        out.logprobs,
        out.ranks,
        out.top_ids,
        out.top_logprobs,
        parts,
        logits.stride(0),
        MOST=MAX_LOGPROBS,
        PARTS=triton.next_power_of_2(parts),
        KEYS=triton.next_power_of_2(parts * MAX_LOGPROBS),
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )


@triton.jit
def _part_logprobs(
    logits,
    rows,
    out_tokens,
    settings,
    part_keys,
    part_sums,
    part_ranks,
    vocab,
    logits_stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c): the best few of part c of row i as keys, Σ exp and how many beat the chosen token."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i)
    chosen = tl.load(out_tokens + i)
    if (row >= 0) & (chosen >= 0):
        wanted = int_field(settings, row, LOGPROBS)
        if wanted >= 0:
            source = logits + i.to(tl.int64) * logits_stride
            token = part * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(source + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            place = i * tl.num_programs(1) + part
            best = tl.max(value)
            base = tl.where(best > float("-inf"), best, 0.0)
            tl.store(part_sums + place * 2, best)
            tl.store(part_sums + place * 2 + 1, tl.sum(tl.exp2((value - base) * LOG2_E)))
            beaten_by = value > tl.load(source + chosen).to(tl.float32)
            tl.store(part_ranks + place, tl.sum(beaten_by.to(tl.int32)))
            keys = tl.where(token < vocab, sort_key(value, token), NO_KEY)
            found = 0
            while found < wanted:
                key = tl.max(keys)
                tl.store(part_keys + place.to(tl.int64) * MOST + found, key)
                keys = tl.where(keys == key, NO_KEY, keys)
                found += 1


@triton.jit
def _merge_logprobs(
    logits,
    rows,
    out_tokens,
    settings,
    part_keys,
    part_sums,
    part_ranks,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    parts,
    logits_stride,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    chosen = tl.load(out_tokens + i)
    if (row >= 0) & (chosen >= 0):
        wanted = int_field(settings, row, LOGPROBS)
        if wanted >= 0:
            part = tl.arange(0, PARTS)
            here = part < parts
            best = tl.load(part_sums + (i * parts + part) * 2, mask=here, other=float("-inf"))
            sums = tl.load(part_sums + (i * parts + part) * 2 + 1, mask=here, other=0.0)
            top = tl.max(best)
            total = tl.sum(tl.where(best > float("-inf"), sums * tl.exp2((best - top) * LOG2_E), 0.0))
            log_total = tl.log(total)
            value = tl.load(logits + i.to(tl.int64) * logits_stride + chosen).to(tl.float32)
            # the best is subtracted first: it is close to the value, so that little precision is lost
            tl.store(logprobs + i, (value - top) - log_total)
            above = tl.sum(tl.load(part_ranks + i * parts + part, mask=here, other=0))
            tl.store(ranks + i, above + 1)
            place = tl.arange(0, KEYS)
            used = (place < parts * MOST) & (place % MOST < wanted)
            keys = tl.load(part_keys + i.to(tl.int64) * parts * MOST + place, mask=used, other=NO_KEY)
            found = 0
            while found < wanted:
                key = tl.max(keys)
                known = key > NO_KEY  # a vocabulary may be smaller than the requested number
                tl.store(top_ids + i * MOST + found, tl.where(known, token_of(key), -1))
                tl.store(top_logprobs + i * MOST + found, (value_of(key) - top) - log_total)
                keys = tl.where(keys == key, NO_KEY, keys)
                found += 1
