"""TorchRunner: executes a StepPlan with the reference decoder, for models the native library lacks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.runner import logits_from, step_result
from ridgeline.engine.schedule.step import StepPlan, StepResult, StepRow
from ridgeline.models.decoders.reference import Decoder
from ridgeline.ops.inputs import InputRow, StepInputs


class TorchRunner:
    name = "torch"

    def __init__(self, decoder: Decoder, kv_cache: list[torch.Tensor], block_size: int, sampler: HostSampler):
        self.decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler
        self._counts: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            self._copy_blocks(plan)
            inputs = StepInputs.from_rows([input_row(row) for row in plan.rows], self._block_size)
            logits = self.decoder.forward(inputs, self._kv_cache)
        self._counts = [row.count for row in plan.rows]
        return step_result(self._sampler, plan.rows, logits.numpy())

    def tap(self, layers: tuple[int, ...]) -> None:
        self.decoder.taps = layers

    def tapped(self) -> list[torch.Tensor]:
        tapped = self.decoder.tapped
        return [] if tapped is None else list(torch.split(tapped, self._counts))

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expert_counts(self) -> dict[int, list[int]]:
        return self.decoder.expert_counts()

    def _copy_blocks(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        sources = torch.tensor([copy.source for copy in plan.copies])
        targets = torch.tensor([copy.target for copy in plan.copies])
        for layer in self._kv_cache:
            layer[:, targets] = layer[:, sources]


def input_row(row: StepRow) -> InputRow:
    return InputRow(row.tokens, row.start, row.seq.block_table, logits_from(row))
