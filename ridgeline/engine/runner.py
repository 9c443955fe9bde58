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
from ridgeline.ops.inputs import StepInputs


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
            inputs, logit_spans = build_inputs(plan.rows, self._block_size)
            logits = self._decoder.forward(inputs, self._kv_cache)
        return self._results(plan.rows, logit_spans, logits.numpy())

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


def build_inputs(rows: list[StepRow], block_size: int) -> tuple[StepInputs, list[range]]:
    """The tensors of one pass, and for each row which rows of the logits are its own."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    logit_rows: list[int] = []
    logit_spans: list[range] = []
    for row in rows:
        first = len(token_ids)
        table = row.seq.block_table
        here = range(row.start, row.start + row.count)
        token_ids += row.seq.tokens[row.start : row.start + row.count]
        positions += here
        slots += [table[p // block_size] * block_size + p % block_size for p in here]
        query_starts.append(len(token_ids))
        wanted = _logit_positions(row, first)
        logit_spans.append(range(len(logit_rows), len(logit_rows) + len(wanted)))
        logit_rows += wanted
    widest = max(-(-(row.start + row.count) // block_size) for row in rows)
    tables = torch.zeros(len(rows), widest, dtype=torch.int64)
    for i, row in enumerate(rows):
        used = row.seq.block_table[:widest]
        tables[i, : len(used)] = torch.tensor(used)
    inputs = StepInputs(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(query_starts),
        context_lens=torch.tensor([row.start + row.count for row in rows]),
        block_tables=tables,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        block_size=block_size,
    )
    return inputs, logit_spans


def _logit_positions(row: StepRow, first: int) -> list[int]:
    """Indices into the step's tokens whose logits are needed: all, the last, or none."""
    if row.prompt_logprobs:
        return list(range(first, first + row.count))
    return [first + row.count - 1] if row.samplers else []
