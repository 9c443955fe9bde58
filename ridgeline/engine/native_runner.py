"""NativeRunner: one call of the native library per StepPlan, with the plan's rows as flat int32 arrays.

Building the arrays is the Python cost of every step, so no Python loop goes over the tokens or blocks of a
row: lists are chained and taken over whole. torch is never imported here.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ridgeline.engine.runner import logits_from, step_result
from ridgeline.engine.sampler import Sampler
from ridgeline.engine.step import StepPlan, StepResult, StepRow
from ridgeline.ops.cpu.library import NativeDecoder

Ints = np.ndarray[Any, np.dtype[np.int32]]


class StepArrays(NamedTuple):
    """T tokens in R rows; L of the tokens need logits. As `NativeDecoder.execute` takes them."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    query_starts: Ints  # [R + 1]
    block_tables: Ints  # [R, B], what lies beyond a row's own blocks is 0
    logit_rows: Ints  # [L]


class NativeRunner:
    name = "native"

    def __init__(self, decoder: NativeDecoder, sampler: Sampler, max_rows: int) -> None:
        """`max_rows`: sequences that commonly sample in one step; their logits have a buffer that stays."""
        self.decoder = decoder
        self._sampler = sampler
        # Fresh pages for megabytes of logits would cost each step more than the sampling of them.
        self._logits = np.empty((max_rows, decoder.vocab), np.float32)

    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.decoder.copy_block(copy.source, copy.target)
        arrays = step_arrays(plan.rows)
        wanted = len(arrays.logit_rows)
        out = self._logits if wanted <= len(self._logits) else None  # prompt logprobs want many, once
        return step_result(self._sampler, plan.rows, self.decoder.execute(*arrays, out))


def step_arrays(rows: list[StepRow]) -> StepArrays:
    starts = np.array([row.start for row in rows], np.int32)
    counts = np.array([row.count for row in rows], np.int32)
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    total = int(query_starts[-1])
    if total == len(rows):  # decodes alone
        token_ids = np.array([row.seq.tokens[row.start] for row in rows], np.int32)
        positions = starts
    else:
        tokens = chain.from_iterable(row.seq.tokens[row.start : row.start + row.count] for row in rows)
        token_ids = np.fromiter(tokens, np.int32, total)
        positions = np.repeat(starts - query_starts[:-1], counts) + np.arange(total, dtype=np.int32)
    return StepArrays(
        token_ids, positions, query_starts, _block_tables(rows), _logit_rows(rows, query_starts)
    )


def _block_tables(rows: list[StepRow]) -> Ints:
    tables = [row.seq.block_table for row in rows]
    lengths = np.array([len(table) for table in tables])
    packed = np.zeros((len(rows), int(lengths.max())), np.int32)
    blocks = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    packed[np.arange(packed.shape[1]) < lengths[:, None]] = blocks
    return packed


def _logit_rows(rows: list[StepRow], query_starts: Ints) -> Ints:
    if all(row.samplers and not row.prompt_logprobs for row in rows):  # nearly every step
        return query_starts[1:] - 1
    wanted: list[int] = []
    for row, begin in zip(rows, query_starts.tolist(), strict=False):  # one more start than rows: the end
        first = logits_from(row)
        if first is not None:
            wanted += range(begin + first, begin + row.count)
    return np.array(wanted, np.int32)
