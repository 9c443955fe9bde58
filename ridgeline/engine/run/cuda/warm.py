"""Compile kernels ahead of the first step: run steps of each kind over tensors without memory, from their
inputs to their samples, and compile what they would launch. Called by the build while the weights are read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.engine.run.cuda.graphs import (
    FIRST_DECODES,
    MIXED_DECODES,
    MIXED_TOKENS,
    PROMPT_TOKENS,
    GraphKey,
)
from ridgeline.engine.run.cuda.padded_steps import PLAN_ROWS, PROMPT_ROWS, most_tiles
from ridgeline.models.decoders.cuda import CudaDecoder
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.models.weights.torch_weights import allocate_weights
from ridgeline.ops.cuda.attention.eight_bit_kv import allocate_kv
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.prefill_plan import ROW_FIELDS, PrefillViews, plan_prefill
from ridgeline.ops.cuda.attention.prefix_groups import LEAST_ROWS
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix, prefix_parts, rows_per_tile
from ridgeline.ops.cuda.blocks import copy_blocks
from ridgeline.ops.cuda.prepare_step import apply_diffs, prepare_step
from ridgeline.ops.cuda.recording import Launch, distinct, recorded
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers
from ridgeline.ops.cuda.sampling.sampling import SampleScratch, sample
from ridgeline.ops.cuda.sampling.state import RowParams, SamplerState

NOWHERE = torch.device("meta")
PLAIN_ROW = RowParams(temperature=0.0)
# Sampling parameters that requests use besides a temperature, most common first.
OTHER_ROWS = (
    RowParams(top_p=0.9, top_k=20),
    RowParams(logprobs=1),
    RowParams(presence_penalty=0.5),
    RowParams(presence_penalty=0.5, top_p=0.9),
    RowParams(bias={0: 1.0}),
    RowParams(bias={0: 1.0}, top_p=0.9),
)
PROMPTS = (1, 3, 16, 17, 32, 65, 100, 128, 300, 512, 1040, 2048, 4097)  # tokens
# Shapes of the first steps: as few kernels as answer any prompt of up to a thousand tokens.
FIRST_PROMPTS = (256, 1024)


class StepDryRun:
    """A decoder and a sampler without memory; records what their steps launch. Sizes follow the runner: a
    multiple of 16 there must be one here."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_rows: int,
        step_tokens: int,
        max_context: int,
        num_blocks: int,
        deterministic: bool = False,
        block_size: int = 16,
        stored_experts: bool = False,
        verifies: bool = False,
        low: LowBitPlan = NOTHING_LOW,
        kv_format: str = "",
    ) -> None:
        """low: of the weights; verifies: some decode batches are tokens with their drafts"""
        self.verifies = verifies and not deterministic
        self.max_rows, self.step_tokens = max_rows, max(step_tokens, max_rows)
        self.max_context = max_context
        self.deterministic = deterministic
        buffers = Buffers.allocate(spec, dtype, NOWHERE, self.step_tokens, max_rows, max_context, low)
        # Layers of one kind launch the same kernels; the last layer launches different ones.
        kinds: dict[object, int] = {}
        for number, layer in enumerate(spec.layers):
            kinds.setdefault((layer, low.of_layer(number)), number)
        numbers = [*kinds.values(), spec.num_layers - 1]
        few = replace(spec, layers=tuple(spec.layers[number] for number in numbers))
        num_layers = max(spec.num_layers, few.num_layers)
        kv_shape = (num_layers, num_blocks, spec.num_kv_heads, 2, block_size, spec.head_dim)
        self._kv, self._kv_steps = torch.empty(kv_shape, dtype=dtype, device=NOWHERE), None
        if kv_format:
            self._kv, self._kv_steps = allocate_kv(kv_shape, kv_format, NOWHERE)
        weights = allocate_weights(
            few, dtype, NOWHERE, None, stored_experts=stored_experts, low=low.of_layers(numbers)
        )
        self._decoder = CudaDecoder(
            few, weights, self._kv, buffers, max_context, deterministic, kv_steps=self._kv_steps
        )
        self._tables = _ints(2 * max_rows + 8, -(-max_context // block_size))
        self._block_size = block_size
        self._tile_tokens = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
        self._sampler = SamplerState(2 * max_rows + 8, spec.vocab_size, NOWHERE)
        self._scratch = SampleScratch(max_rows, spec.vocab_size, NOWHERE)
        self._logprobs = LogprobBuffers(max_rows, spec.vocab_size, NOWHERE)
        self._logits = buffers.logits
        self.has_experts = spec.is_mixture
        self.shares_prefixes = (
            not deterministic and not kv_format and any(mixer.window is None for mixer in spec.attentions)
        )

    def decodes(self, rows: int, *, sharing: bool = False, verifies: bool = False) -> list[Launch]:
        """A decode batch of `rows` rows; `sharing`: some of them share their first blocks; `verifies`: some
        are drafts."""
        prefix = self._prefix(rows) if sharing else None
        step = self._step(rows, rows, rows, prefix=prefix, verifies=verifies)
        return recorded(lambda: self._decoder.forward(step))

    def prompts(self, lengths: list[int], decodes: int = 0, cached: int = 0) -> list[Launch]:
        """Prompts, or the part after `cached` tokens of each, together with some decodes."""
        plan = plan_prefill(
            lengths,
            [cached + length for length in lengths],
            self._tile_tokens,
            table_rows=list(range(len(lengths))),
            first_token=decodes,
        )
        views = plan.device_views(_ints(plan.packed_size))
        tokens = sum(lengths) + decodes
        logits = len(lengths) + decodes
        step = self._step(tokens, decodes, logits, prefill=views, logit_rows=_ints(logits))
        return recorded(lambda: self._decoder.forward(step))

    def padded(self, tokens: int, decodes: int = 0) -> list[Launch]:
        """A step in the shape of a graph: decode rows, and this many tokens of prompts."""
        logits = min(decodes + PROMPT_ROWS, self.max_rows)
        tiles = _ints(most_tiles(tokens, self._tile_tokens), 2)
        rows = _ints(PLAN_ROWS, ROW_FIELDS)
        views = PrefillViews(rows, tiles, _ints(0, 2), self._tile_tokens, 0, 0.0)
        step = self._step(tokens + decodes, decodes, logits, prefill=views, logit_rows=_ints(logits))
        return recorded(lambda: self._decoder.forward(step))

    def inputs(self) -> list[Launch]:
        """The kernels before a step, which read the host's integers."""
        staged, tokens = _ints(4096), _ints(16)

        def take_in() -> None:
            apply_diffs(staged, 64, 1, self._tables)
            prepare_step(staged, 1, 16, self._tables, _ints(64), tokens, tokens, tokens, self._block_size)

        return recorded(take_in)

    def copies(self) -> list[Launch]:
        """Copies of KV blocks where sequences fork."""

        def copy() -> None:
            copy_blocks(self._kv, _ints(1), _ints(1))
            if self._kv_steps is not None:
                copy_blocks(self._kv_steps, _ints(1), _ints(1))

        return recorded(copy)

    def samples(self, rows: int, params: RowParams = PLAIN_ROW) -> list[Launch]:
        """Sending a sequence's parameters and sampling tokens for `rows` rows."""

        def choose() -> None:
            self._sampler.set_row(0, params, prompt=[0], output=[0])
            self._sampler.flush()
            plan = self._sampler.plan([0], [0])
            numbers, chosen = _ints(rows), _ints(rows)
            logprobs = None if plan.logprobs is None else self._logprobs
            last = _ints(self._sampler.max_rows)
            logits = self._logits[:rows]
            sample(logits, numbers, numbers, self._sampler, last, chosen, self._scratch, plan, logprobs)
            self._sampler.clear_row(0)

        return recorded(choose)

    def _prefix(self, rows: int) -> SharedPrefix:
        spec = self._decoder.spec
        tiles = -(-rows // rows_per_tile(spec.num_heads, spec.num_kv_heads))
        return SharedPrefix(
            first_rows=_ints(tiles),
            row_counts=_ints(tiles),
            tile_tokens=_ints(tiles),
            tokens=_ints(rows),
            parts=prefix_parts(rows, spec.num_heads, spec.num_kv_heads),
        )

    def _step(self, tokens: int, decodes: int, logits: int, **more: object) -> DeviceStep:
        return DeviceStep(
            token_ids=_ints(tokens),
            positions=_ints(tokens),
            slots=_ints(tokens),
            tables=self._tables,
            table_rows=_ints(decodes),
            num_decodes=decodes,
            num_logits=logits,
            **more,  # type: ignore[arg-type]
        )


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=NOWHERE)


def first_kernels(dry_run: StepDryRun) -> list[Launch]:
    """The kernels for any short prompt and one stream, needed before any request can be answered."""
    if dry_run.deterministic:
        steps = dry_run.prompts([8]) + dry_run.prompts([1])
    else:
        steps = dry_run.decodes(1)
        for tokens in first_prompts(dry_run.step_tokens):
            steps += dry_run.padded(tokens)
    launches = distinct(steps + dry_run.inputs() + dry_run.samples(1))
    return sorted(launches, key=lambda launch: "attend" not in launch.kernel.__name__)  # they take longest


def first_prompts(step_tokens: int) -> list[int]:
    """Sizes of the padded steps that `first_kernels` is for; where steps are smaller, the largest there
    is."""
    sizes = [size for size in PROMPT_TOKENS if size <= step_tokens]
    return [size for size in FIRST_PROMPTS if size in sizes] or sizes[-1:]


def first_keys(step_tokens: int) -> set[GraphKey]:
    """Shapes of steps that need `first_kernels` alone."""
    return {GraphKey(1), *(GraphKey(0, prompt_tokens=tokens) for tokens in first_prompts(step_tokens))}


def urgent_keys(step_tokens: int, decode_sizes: list[int]) -> set[GraphKey]:
    """Shapes of steps that need `urgent_kernels` alone."""
    prompts = {GraphKey(0, prompt_tokens=tokens) for tokens in PROMPT_TOKENS if tokens <= step_tokens}
    return prompts | {GraphKey(rows) for rows in decode_sizes if rows <= FIRST_DECODES}


def trial_kernels(dry_runs: list[StepDryRun], rows: int, tokens: int) -> list[Launch]:
    """The kernels for a decode batch of `rows` and a prompt of `tokens`, for each decoder."""
    launches: list[Launch] = []
    for dry_run in dry_runs:
        decode = dry_run.prompts([1] * rows) if dry_run.deterministic else dry_run.decodes(rows)
        launches += decode + dry_run.prompts([tokens])
    return distinct(launches)


def urgent_kernels(dry_run: StepDryRun, decode_sizes: list[int]) -> list[Launch]:
    """The kernels for prompts and batches of a few users, with all sampling parameters."""
    launches = first_kernels(dry_run)
    for params in OTHER_ROWS:
        launches += dry_run.samples(1, params)
    if not dry_run.deterministic:
        for tokens in PROMPT_TOKENS:
            if tokens <= dry_run.step_tokens:
                launches += dry_run.padded(tokens)
        for rows in decode_sizes:
            if rows <= FIRST_DECODES:
                launches += dry_run.decodes(rows)
    return distinct(launches)


def other_kernels(dry_run: StepDryRun, decode_sizes: list[int]) -> list[Launch]:
    """The kernels for larger batches and longer prompts, and `urgent_kernels`."""
    launches = urgent_kernels(dry_run, decode_sizes)
    launches += dry_run.copies()
    launches += _long_prompts(dry_run)
    for rows in decode_sizes:
        launches += dry_run.samples(rows)
        if not dry_run.deterministic:
            launches += dry_run.decodes(rows)
    for params in OTHER_ROWS:
        launches += dry_run.samples(min(8, dry_run.max_rows), params)
    if dry_run.verifies:
        for rows in decode_sizes:
            launches += dry_run.decodes(rows, verifies=True)
    launches += _mixed(dry_run)
    if dry_run.shares_prefixes:
        for rows in decode_sizes:
            if rows >= LEAST_ROWS:
                launches += dry_run.decodes(rows, sharing=True)
    return distinct(launches)


def _long_prompts(dry_run: StepDryRun) -> list[Launch]:
    """Steps without a graph: several prompts, long ones, and chunks or what follows a cached prefix."""
    most = dry_run.step_tokens
    launches: list[Launch] = []
    half = max(1, most // 2)
    for lengths in ([half, half], [33] * 3, [65] * 4):
        if sum(lengths) <= most:
            launches += dry_run.prompts(lengths)
    for length in (17, 512, half):
        if length <= most and length < dry_run.max_context:
            launches += dry_run.prompts([length], cached=dry_run.max_context - length)
    for length in PROMPTS:
        for decodes in (0,) if dry_run.deterministic else (0, 1, 5, 16, 40):
            if length + decodes <= most and decodes < dry_run.max_rows:
                launches += dry_run.prompts([length], decodes)
    if dry_run.has_experts:  # the sort of their rows is compiled for each power of two
        for length in (*(1 << bits for bits in range(most.bit_length())), most):
            launches += dry_run.prompts([min(length, dry_run.max_context)])
    return launches


def _mixed(dry_run: StepDryRun) -> list[Launch]:
    launches: list[Launch] = []
    if not dry_run.deterministic:
        for decodes in MIXED_DECODES:
            for tokens in MIXED_TOKENS:
                if decodes <= dry_run.max_rows and decodes + tokens <= dry_run.step_tokens:
                    launches += dry_run.padded(tokens, decodes)
    return launches
