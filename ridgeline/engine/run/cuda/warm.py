"""Compiling kernels ahead of the first step: steps of each kind are run over tensors without memory, from
their inputs to their samples, and what they would launch is compiled. Called by the build while the weights
are read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.models.decoders.cuda import CudaDecoder, DeviceStep
from ridgeline.models.decoders.cuda_buffers import Buffers
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import allocate_weights
from ridgeline.ops.cuda.attention.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.attention.prefill_plan import plan_prefill
from ridgeline.ops.cuda.attention.prefix_groups import LEAST_ROWS
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix, prefix_parts, rows_per_tile
from ridgeline.ops.cuda.blocks import copy_blocks
from ridgeline.ops.cuda.inputs import apply_diffs, prepare_step
from ridgeline.ops.cuda.recording import Launch, distinct, recorded
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers
from ridgeline.ops.cuda.sampling.sampling import SampleScratch, sample
from ridgeline.ops.cuda.sampling.state import RowParams, SamplerState

NOWHERE = torch.device("meta")
PLAIN_ROW = RowParams(temperature=0.0)
# What requests ask for beyond a temperature, the usual first.
OTHER_ROWS = (
    RowParams(top_p=0.9, top_k=20),
    RowParams(logprobs=1),
    RowParams(presence_penalty=0.5),
    RowParams(presence_penalty=0.5, top_p=0.9),
    RowParams(bias={0: 1.0}),
    RowParams(bias={0: 1.0}, top_p=0.9),
)
PROMPTS = (1, 3, 16, 17, 32, 65, 100, 128, 300, 512, 1040, 2048, 4097)  # tokens


class StepRehearsal:
    """A decoder and a sampler without memory, for what their steps launch. Sizes are those of the runner: a
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
    ) -> None:
        self.max_rows, self.step_tokens = max_rows, max(step_tokens, max_rows)
        self.max_context = max_context
        self.deterministic = deterministic
        buffers = Buffers.allocate(spec, dtype, NOWHERE, self.step_tokens, max_rows, max_context)
        # Layers of a kind launch the same kernels; the last one of all launches others.
        few = replace(spec, layers=(*dict.fromkeys(spec.layers), spec.layers[-1]))
        num_layers = max(spec.num_layers, few.num_layers)
        kv_shape = (num_layers, num_blocks, spec.num_kv_heads, 2, block_size, spec.head_dim)
        self._kv = torch.empty(kv_shape, dtype=dtype, device=NOWHERE)
        weights = allocate_weights(few, dtype, NOWHERE, None)
        self._decoder = CudaDecoder(few, weights, self._kv, buffers, max_context, deterministic)
        self._tables = _ints(2 * max_rows + 8, -(-max_context // block_size))
        self._block_size = block_size
        self._tile_tokens = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
        self._sampler = SamplerState(2 * max_rows + 8, spec.vocab_size, NOWHERE)
        self._scratch = SampleScratch(max_rows, spec.vocab_size, NOWHERE)
        self._logprobs = LogprobBuffers(max_rows, spec.vocab_size, NOWHERE)
        self._logits = buffers.logits
        self.shares_prefixes = not deterministic and any(layer.window is None for layer in spec.layers)

    def decodes(self, rows: int, *, sharing: bool = False) -> list[Launch]:
        """A decode batch of so many rows; `sharing`: some of them stand on the same first blocks."""
        step = self._step(rows, rows, rows, prefix=self._prefix(rows) if sharing else None)
        return recorded(lambda: self._decoder.forward(step))

    def prompts(self, lengths: list[int], decodes: int = 0, cached: int = 0) -> list[Launch]:
        """Prompts, or what follows `cached` tokens of each, beside some decodes."""
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

    def inputs(self) -> list[Launch]:
        """What comes before a step: the host's numbers taken in."""
        staged, tokens = _ints(4096), _ints(16)

        def take_in() -> None:
            apply_diffs(staged, 64, 1, self._tables)
            prepare_step(staged, 1, 16, self._tables, _ints(64), tokens, tokens, tokens, self._block_size)

        return recorded(take_in)

    def copies(self) -> list[Launch]:
        """KV blocks copied where sequences part."""
        return recorded(lambda: copy_blocks(self._kv, _ints(1), _ints(1)))

    def samples(self, rows: int, params: RowParams = PLAIN_ROW) -> list[Launch]:
        """A sequence's parameters sent, and tokens chosen for so many rows."""

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


def first_kernels(rehearsal: StepRehearsal) -> list[Launch]:
    """What a short prompt and one stream need: without these nothing can be answered."""
    one = rehearsal.prompts([1]) if rehearsal.deterministic else rehearsal.decodes(1)
    launches = distinct(rehearsal.prompts([8]) + one + rehearsal.inputs() + rehearsal.samples(1))
    return sorted(launches, key=lambda launch: "attend" not in launch.kernel.__name__)  # they take longest


def trial_kernels(rehearsals: list[StepRehearsal], rows: int, tokens: int) -> list[Launch]:
    """What a decode batch of so many rows and a prompt of so many tokens need, of each decoder."""
    launches: list[Launch] = []
    for rehearsal in rehearsals:
        decode = rehearsal.prompts([1] * rows) if rehearsal.deterministic else rehearsal.decodes(rows)
        launches += decode + rehearsal.prompts([tokens])
    return distinct(launches)


def other_kernels(rehearsal: StepRehearsal, decode_sizes: list[int]) -> list[Launch]:
    """What larger batches, longer prompts and other sampling parameters need; `first_kernels` too."""
    most = rehearsal.step_tokens
    launches: list[Launch] = []
    if not rehearsal.deterministic:
        for rows in decode_sizes:
            launches += rehearsal.decodes(rows)
    for rows in decode_sizes:
        launches += rehearsal.samples(rows)
    half = max(1, most // 2)
    for lengths in ([half, half], [33] * 3, [65] * 4):
        if sum(lengths) <= most:
            launches += rehearsal.prompts(lengths)
    for length in (17, 512, half):  # a chunk of a long prompt, or what differs from a cached one
        if length <= most and length < rehearsal.max_context:
            launches += rehearsal.prompts([length], cached=rehearsal.max_context - length)
    for length in PROMPTS:
        for decodes in (0,) if rehearsal.deterministic else (0, 1, 5, 16, 40):
            if length + decodes <= most and decodes < rehearsal.max_rows:
                launches += rehearsal.prompts([length], decodes)
    for params in OTHER_ROWS:
        for rows in (1, 8):
            launches += rehearsal.samples(min(rows, rehearsal.max_rows), params)
    if rehearsal.shares_prefixes:
        for rows in decode_sizes:
            if rows >= LEAST_ROWS:
                launches += rehearsal.decodes(rows, sharing=True)
    return distinct(launches + rehearsal.copies() + rehearsal.inputs())
