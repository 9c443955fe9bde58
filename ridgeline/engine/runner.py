"""Runner: owns the device state (weights, KV cache) and turns a StepPlan into one forward pass.

It never decides what runs. One implementation per backend family; `TorchRunner` is the reference one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ridgeline.engine.request import Sequence
from ridgeline.engine.sampler import Logits, Sampler
from ridgeline.engine.step import RowResult, Sampled, StepPlan, StepResult, StepRow
from ridgeline.models.decoder import Decoder
from ridgeline.ops.inputs import InputRow, StepInputs


class Runner(Protocol):
    """What the engine needs of a backend."""

    name: str

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. KV writes are idempotent: a row may safely be executed again."""
        ...


class TorchRunner:
    name = "torch"

    def __init__(self, decoder: Decoder, kv_cache: list[torch.Tensor], block_size: int, sampler: Sampler):
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._sampler = sampler

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            self._copy_blocks(plan)
            rows = [input_row(row) for row in plan.rows]
            inputs = StepInputs.from_rows(rows, self._block_size)
            logits = self._decoder.forward(inputs, self._kv_cache)
        return self._results(plan.rows, logit_spans(rows), logits.numpy())

    def _copy_blocks(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        sources = torch.tensor([copy.source for copy in plan.copies])
        targets = torch.tensor([copy.target for copy in plan.copies])
        for layer in self._kv_cache:
            layer[:, targets] = layer[:, sources]

    def _results(self, rows: list[StepRow], spans: list[range], logits: Logits) -> StepResult:
        picks: list[tuple[int, Sequence]] = []
        for row, span in zip(rows, spans, strict=True):
            picks += [(span[-1], seq) for seq in row.samplers]
        sampled = iter(self._sampler.sample(logits, picks))
        return StepResult(
            [self._row_result(row, span, logits, sampled) for row, span in zip(rows, spans, strict=True)]
        )

    def _row_result(self, row: StepRow, span: range, logits: Logits, sampled: Iterator[Sampled]) -> RowResult:
        samples = [next(sampled) for _ in row.samplers]
        if not row.prompt_logprobs:
            return RowResult(samples)
        targets = row.seq.tokens[row.start + 1 : min(row.start + row.count + 1, row.seq.prompt_len)]
        count = row.seq.params.prompt_logprobs or 0
        predicted = self._sampler.prompt_logprobs(
            logits[span.start : span.start + len(targets)], targets, count
        )
        return RowResult(samples, predicted)


def input_row(row: StepRow) -> InputRow:
    """The row's tokens and blocks; logits for all of its tokens, the last one, or none."""
    logits_from = 0 if row.prompt_logprobs else row.count - 1 if row.samplers else None
    tokens = row.seq.tokens[row.start : row.start + row.count]
    return InputRow(tokens, row.start, row.seq.block_table, logits_from)


def logit_spans(rows: list[InputRow]) -> list[range]:
    """For each row, which rows of the step's logits are its own."""
    spans: list[range] = []
    end = 0
    for row in rows:
        begin = end
        end += 0 if row.logits_from is None else len(row.token_ids) - row.logits_from
        spans.append(range(begin, end))
    return spans
