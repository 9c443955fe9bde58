"""Compiling the decoder's kernels ahead of the first step: a step of each kind is run over tensors without
memory, and what it would launch is compiled. Called by the build while the weights are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.models.cuda_buffers import Buffers
from ridgeline.models.cuda_decoder import CudaDecoder, DeviceStep
from ridgeline.models.spec import ModelSpec
from ridgeline.models.weights import allocate_weights
from ridgeline.ops.cuda.prefill_attention import tile_tokens_of
from ridgeline.ops.cuda.prefill_plan import plan_prefill
from ridgeline.ops.cuda.recording import Launch, recorded

NOWHERE = torch.device("meta")


class StepRehearsal:
    """A decoder without memory, for what its steps launch."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_running: int,
        step_tokens: int,
        max_context: int,
        deterministic: bool = False,
        block_size: int = 16,
    ) -> None:
        buffers = Buffers.allocate(spec, dtype, NOWHERE, step_tokens, max_running, max_context)
        kv = torch.empty(
            spec.num_layers, 8, spec.num_kv_heads, 2, block_size, spec.head_dim, dtype=dtype, device=NOWHERE
        )
        weights = allocate_weights(spec, dtype, NOWHERE, None)
        self._decoder = CudaDecoder(spec, weights, kv, buffers, max_context, deterministic)
        self._tables = _ints(2 * max_running, -(-max_context // block_size))
        self._tile_tokens = tile_tokens_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)

    def decodes(self, rows: int) -> list[Launch]:
        """A decode batch of so many rows."""
        step = self._step(rows, rows, rows)
        return recorded(lambda: self._decoder.forward(step))

    def prompts(self, lengths: list[int], decodes: int = 0) -> list[Launch]:
        """Whole prompts beside some decodes."""
        plan = plan_prefill(
            lengths, lengths, self._tile_tokens, table_rows=list(range(len(lengths))), first_token=decodes
        )
        views = plan.device_views(_ints(plan.packed_size))
        tokens = sum(lengths) + decodes
        logits = len(lengths) + decodes
        step = self._step(tokens, decodes, logits, prefill=views, logit_rows=_ints(logits))
        return recorded(lambda: self._decoder.forward(step))

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
    return rehearsal.prompts([8]) + rehearsal.decodes(1)


def other_kernels(rehearsal: StepRehearsal, max_running: int, step_tokens: int) -> list[Launch]:
    """What larger batches and longer prompts need."""
    half = max(1, step_tokens // 2)
    launches = rehearsal.prompts([half, half]) + rehearsal.prompts(
        [min(100, half)], decodes=min(5, max_running)
    )
    for rows in (2, 4, 16, 32, 64, 128, 256):
        if rows <= max_running:
            launches += rehearsal.decodes(rows)
    return launches
