"""The sampling kernels' state of each sequence, in permanent device rows, and how the host changes it.

The host stages whole rows (`set_row`), and `flush` sends everything staged with one copy and one kernel; it
never waits for the device. `plan` decides, from what the host knows, which kernels a step needs. Tables of
token counts exist only for rows with penalties; the draw itself updates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.sampling import mix64

IntArray = np.ndarray[Any, np.dtype[np.int32]]

MAX_BIASED = 1024  # ids per row
MAX_SUPPRESSED = 1152  # ids per row: a request's stop ids and the model's end ids
MAX_LOGPROBS = 20
COLDEST_PLAIN = 0.1  # below it, float32 needs the row's maximum subtracted first: the filters find it

# The columns of `SamplerState.params` [rows, FIELDS] int32; those marked f hold the bits of a float32.
INVERSE_TEMPERATURE = tl.constexpr(0)  # f; 0 is greedy
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)  # f
MIN_P_GAP = tl.constexpr(3)  # f: logits further than this below the best are out (at most 0)
STREAM_LOW = tl.constexpr(4)  # the hashed seed, in two halves
STREAM_HIGH = tl.constexpr(5)
REPETITION = tl.constexpr(6)  # f
PRESENCE = tl.constexpr(7)  # f
FREQUENCY = tl.constexpr(8)  # f
MIN_TOKENS = tl.constexpr(9)
BIASED = tl.constexpr(10)
SUPPRESSED = tl.constexpr(11)
COUNT_SLOT = tl.constexpr(12)  # the row's index in the table of token counts, or -1
LOGPROBS = tl.constexpr(13)  # alternatives to report, or -1
FLAGS = tl.constexpr(14)
FIELDS = tl.constexpr(16)

FILTERED = tl.constexpr(1)  # flags: the row needs a threshold
ADJUSTED = tl.constexpr(2)  # the row's logits are changed first

IN_PROMPT = tl.constexpr(1 << 30)  # added to the count of a token in the output

# A record of the staged changes: the row, its params, then the offsets of its lists.
_BIAS_AT = tl.constexpr(17)
_SUPPRESSED_AT = tl.constexpr(18)
_PROMPT_AT = tl.constexpr(19)
_PROMPT_COUNT = tl.constexpr(20)
_OUTPUT_AT = tl.constexpr(21)
_OUTPUT_COUNT = tl.constexpr(22)
_RECORD = tl.constexpr(24)
_RING = 4  # host buffers, used in rotation: one is overwritten only when its copy is done
_FIRST_COUNT_SLOTS = 8


@dataclass(frozen=True, slots=True)
class RowParams:
    """One sequence's sampling parameters. suppressed: ids it may not choose before min_tokens."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    constrained: bool = False  # a step may have a mask of the allowed tokens

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filtered(self) -> bool:
        if self.temperature == 0.0:
            return False
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return filters or self.temperature < COLDEST_PLAIN


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Which kernels a batch needs beyond the plain draw; known to the host."""

    filtered: bool = False
    adjusted: bool = False  # bias, penalties, masks or suppressed ids
    counted: bool = False  # penalties: drawn tokens are counted
    logprobs: int | None = None  # the most alternatives any row asks for

    @property
    def plain(self) -> bool:
        return not (self.filtered or self.adjusted or self.counted) and self.logprobs is None


PLAIN = SamplePlan()


def unsupported(params: RowParams, *, prompt_logprobs: int | None = None) -> str | None:
    """Why these parameters cannot be sampled on the device; None if they can."""
    if prompt_logprobs is not None:
        return "log-probabilities of the prompt"
    if len(params.bias) > MAX_BIASED:
        return f"more than {MAX_BIASED} biased tokens"
    if params.min_tokens > 0 and len(params.suppressed) > MAX_SUPPRESSED:
        return f"more than {MAX_SUPPRESSED} end tokens with min_tokens"
    if params.logprobs is not None and params.logprobs > MAX_LOGPROBS:
        return f"more than {MAX_LOGPROBS} log-probabilities per token"
    return None


class SamplerState:
    """The rows' parameters on the device (`params` and lists) and the host's copy of what they need."""

    def __init__(self, max_rows: int, vocab: int, device: str | torch.device) -> None:
        self.max_rows, self.vocab, self.device = max_rows, vocab, torch.device(device)
        options: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.params = torch.zeros(max_rows, FIELDS.value, **options)
        self.biased_tokens = torch.zeros(max_rows, MAX_BIASED, **options)
        self.bias_values = torch.zeros(max_rows, MAX_BIASED, dtype=torch.float32, device=self.device)
        self.suppressed = torch.zeros(max_rows, MAX_SUPPRESSED, **options)
        self.counts = torch.zeros(0, vocab, **options)  # [slots, vocab]; grows on demand
        self._free_slots: list[int] = []
        self._slots: dict[int, int] = {}
        self._staged: dict[int, tuple[IntArray, list[IntArray]]] = {}
        # what the host needs to know of every row to plan a step
        self._classes = np.zeros((max_rows, 4), dtype=np.int32)  # filtered, adjusted, min_tokens, counted
        self._logprobs = np.full(max_rows, -1, dtype=np.int32)
        self._special: set[int] = set()  # rows that need more than a plain draw
        self._buffers: list[Tensor | None] = [None] * _RING
        self._copied: list[Any] = [None] * _RING
        self._turn = 0
        self._on_device: Tensor = torch.zeros(0, **options)

    def set_row(
        self, row: int, params: RowParams, prompt: Tokens[int] = (), output: Tokens[int] = ()
    ) -> None:
        """Stage a row. `prompt` and `output` (tokens chosen before now) only matter for penalties."""
        reason = unsupported(params)
        if reason is not None:
            raise ValueError(f"the device cannot sample with {reason}")
        self.clear_row(row)
        slot = self._take_slot(row) if params.penalized else -1
        min_tokens = params.min_tokens if params.suppressed else 0
        self._classes[row] = params.filtered, _is_adjusted(params), min_tokens, slot >= 0
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        if self._classes[row].any() or params.logprobs is not None:
            self._special.add(row)
        record = np.zeros(_RECORD.value, dtype=np.int32)
        record[0] = row
        record[1 : 1 + FIELDS.value] = _fields(params, slot, min_tokens)
        lists = [
            np.fromiter(params.bias, dtype=np.int32, count=len(params.bias)),
            np.fromiter(params.bias.values(), dtype=np.float32, count=len(params.bias)).view(np.int32),
            np.asarray(params.suppressed if min_tokens else (), dtype=np.int32),
            np.asarray(prompt if slot >= 0 else (), dtype=np.int32),
            np.asarray(output if slot >= 0 else (), dtype=np.int32),
        ]
        record[_PROMPT_COUNT.value], record[_OUTPUT_COUNT.value] = lists[3].size, lists[4].size
        self._staged[row] = record, lists

    def clear_row(self, row: int) -> None:
        """Free the row: nothing is sent, but a step without such rows is plain again."""
        self._classes[row] = 0
        self._logprobs[row] = -1
        self._special.discard(row)
        self._staged.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free_slots.append(slot)

    def plan(self, rows: Tokens[int] | IntArray, draw_positions: Tokens[int] | IntArray) -> SamplePlan:
        """The kernels needed by a batch of these rows (-1: padding) at these output positions."""
        if not self._special:
            return PLAIN
        places = np.asarray(rows, dtype=np.int64)
        used = places >= 0
        places = places[used]
        classes = self._classes[places]
        too_short = classes[:, 2] > np.asarray(draw_positions)[used]
        most = int(self._logprobs[places].max(initial=-1))
        return SamplePlan(
            filtered=bool(classes[:, 0].any()),
            adjusted=bool(classes[:, 1].any() or too_short.any()),
            counted=bool(classes[:, 3].any()),
            logprobs=most if most >= 0 else None,
        )

    def flush(self) -> None:
        """Send what was staged. Later launches on the current stream see it; earlier ones do not."""
        if not self._staged:
            return
        counted_first = sorted(self._staged.values(), key=lambda item: item[0][1 + COUNT_SLOT.value] < 0)
        self._staged = {}
        records = np.stack([record for record, _ in counted_first])
        end = records.size
        for record, lists in zip(records, (lists for _, lists in counted_first), strict=True):
            starts = end + np.cumsum([0] + [part.size for part in lists])
            record[_BIAS_AT.value], record[_SUPPRESSED_AT.value] = starts[0], starts[2]
            record[_PROMPT_AT.value], record[_OUTPUT_AT.value] = starts[3], starts[4]
            end = int(starts[-1])
        parts = [records.reshape(-1)] + [part for _, lists in counted_first for part in lists]
        blob = self._send(np.concatenate(parts))
        _apply_records[(len(records),)](
            blob,
            self.params,
            self.biased_tokens,
            self.bias_values,
            self.suppressed,
            BIAS_WIDTH=MAX_BIASED,
            SUPPRESSED_WIDTH=MAX_SUPPRESSED,
            BLOCK=128,
            PDL=PDL,
            **pdl_options(),
        )
        counted = int((records[:, 1 + COUNT_SLOT.value] >= 0).sum())
        if counted:
            self._recount(blob, records[:counted])

    def _recount(self, blob: Tensor, records: IntArray) -> None:
        longest = int(records[:, [_PROMPT_COUNT.value, _OUTPUT_COUNT.value]].max(initial=1))
        grid = (len(records), triton.cdiv(self.vocab, 4096))
        _clear_counts[grid](blob, self.counts, self.vocab, BLOCK=4096, PDL=PDL, **pdl_options())
        grid = (len(records), max(1, triton.cdiv(longest, 512)))
        _count_tokens[grid](blob, self.counts, self.vocab, BLOCK=512, PDL=PDL, **pdl_options())

    def _send(self, values: IntArray) -> Tensor:
        """The values on the device, without waiting for it."""
        if self._on_device.numel() < values.size:
            self._on_device = torch.empty(max(4096, 2 * values.size), dtype=torch.int32, device=self.device)
        target = self._on_device[: values.size]
        if self.device.type != "cuda":
            target.copy_(torch.from_numpy(values))
            return self._on_device
        turn = self._turn = (self._turn + 1) % _RING
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()  # of _RING flushes ago: done, unless the host is that far ahead
        buffer = self._buffers[turn]
        if buffer is None or buffer.numel() < values.size:
            buffer = torch.empty(max(4096, 2 * values.size), dtype=torch.int32, pin_memory=True)
            self._buffers[turn] = buffer
        buffer.numpy()[: values.size] = values
        target.copy_(buffer[: values.size], non_blocking=True)
        self._copied[turn] = torch.cuda.Event()
        self._copied[turn].record()
        return self._on_device

    def _take_slot(self, row: int) -> int:
        if not self._free_slots:
            have = self.counts.shape[0]
            more = min(max(have, _FIRST_COUNT_SLOTS), self.max_rows - have)
            fresh = torch.zeros(more, self.vocab, dtype=torch.int32, device=self.device)
            self.counts = torch.cat([self.counts, fresh])
            self._free_slots = list(range(have + more - 1, have - 1, -1))
        self._slots[row] = self._free_slots.pop()
        return self._slots[row]


def _fields(params: RowParams, slot: int, min_tokens: int) -> IntArray:
    """The row of `SamplerState.params`."""
    fields = np.zeros(FIELDS.value, dtype=np.int32)
    floats = fields.view(np.float32)
    sampled = params.temperature > 0.0
    # beyond 1e30 a difference of logits would overflow; only equal logits matter there
    floats[INVERSE_TEMPERATURE.value] = min(1.0 / params.temperature, 1e30) if sampled else 0.0
    fields[TOP_K.value] = min(params.top_k, 2**31 - 1)
    floats[TOP_P.value] = params.top_p
    floats[MIN_P_GAP.value] = params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    stream = np.array([mix64(params.seed)], dtype=np.uint64)
    fields[STREAM_LOW.value : STREAM_HIGH.value + 1] = stream.view(np.int32)
    floats[REPETITION.value] = params.repetition_penalty
    floats[PRESENCE.value] = params.presence_penalty
    floats[FREQUENCY.value] = params.frequency_penalty
    fields[MIN_TOKENS.value] = min_tokens
    fields[BIASED.value] = len(params.bias)
    fields[SUPPRESSED.value] = len(params.suppressed) if min_tokens else 0
    fields[COUNT_SLOT.value] = slot
    fields[LOGPROBS.value] = -1 if params.logprobs is None else params.logprobs
    fields[FLAGS.value] = FILTERED.value * params.filtered | ADJUSTED.value * _is_adjusted(params)
    return fields


def _is_adjusted(params: RowParams) -> bool:
    return bool(params.bias) or params.penalized or params.constrained


@triton.jit
def _apply_records(
    blob,
    settings,
    biased_tokens,
    bias_values,
    suppressed,
    BIAS_WIDTH: tl.constexpr,
    SUPPRESSED_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per record: the row's settings and lists into their tables."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    record = blob + tl.program_id(0) * _RECORD
    row = tl.load(record)
    fields = tl.arange(0, FIELDS)
    tl.store(settings + row * FIELDS + fields, tl.load(record + 1 + fields))
    biased = tl.load(record + 1 + BIASED)
    source = blob + tl.load(record + _BIAS_AT)
    start = 0
    while start < biased:  # the interpreter does not support `range` of a loaded number
        place = start + tl.arange(0, BLOCK)
        mask = place < biased
        tl.store(biased_tokens + row * BIAS_WIDTH + place, tl.load(source + place, mask=mask), mask=mask)
        value = tl.load(source + biased + place, mask=mask).to(tl.float32, bitcast=True)
        tl.store(bias_values + row * BIAS_WIDTH + place, value, mask=mask)
        start += BLOCK
    count = tl.load(record + 1 + SUPPRESSED)
    source = blob + tl.load(record + _SUPPRESSED_AT)
    start = 0
    while start < count:
        place = start + tl.arange(0, BLOCK)
        mask = place < count
        tl.store(suppressed + row * SUPPRESSED_WIDTH + place, tl.load(source + place, mask=mask), mask=mask)
        start += BLOCK


@triton.jit
def _clear_counts(blob, counts, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(blob + tl.program_id(0) * _RECORD + 1 + COUNT_SLOT).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + slot * vocab + token, tl.zeros((BLOCK,), tl.int32), mask=token < vocab)


@triton.jit
def _count_tokens(blob, counts, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Mark the prompt's tokens and count the output's."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    record = blob + tl.program_id(0) * _RECORD
    table = counts + tl.load(record + 1 + COUNT_SLOT).to(tl.int64) * vocab
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < tl.load(record + _PROMPT_COUNT)
    token = tl.load(blob + tl.load(record + _PROMPT_AT) + place, mask=mask, other=-1)
    tl.atomic_or(table + token, IN_PROMPT, mask=mask & (token >= 0) & (token < vocab))
    mask = place < tl.load(record + _OUTPUT_COUNT)
    token = tl.load(blob + tl.load(record + _OUTPUT_AT) + place, mask=mask, other=-1)
    tl.atomic_add(table + token, 1, mask=mask & (token >= 0) & (token < vocab))
