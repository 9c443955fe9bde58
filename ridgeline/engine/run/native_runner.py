"""NativeRunner: one call of the native library per StepPlan, with the plan's rows as flat int32 arrays.

Building the arrays is the Python cost of every step, so no Python loop iterates over the tokens or blocks of
a row: whole lists are chained and converted. torch is never imported here.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.runner import best_token_result, logits_from, step_result, want_best_tokens_alone
from ridgeline.engine.schedule.step import StepPlan, StepResult, StepRow
from ridgeline.ops.cpu.library import NativeDecoder

Ints = np.ndarray[Any, np.dtype[np.int32]]


class StepArrays(NamedTuple):
    """T tokens in R rows; L of the tokens need logits. In the format of `NativeDecoder.execute`."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    query_starts: Ints  # [R + 1]
    block_tables: Ints  # [R, B], 0 beyond a row's own blocks
    logit_rows: Ints  # [L]


class NativeRunner:
    name = "native"

    def __init__(self, decoder: NativeDecoder, sampler: HostSampler, max_rows: int) -> None:
        """`max_rows`: sequences that commonly sample in one step; a permanent buffer holds their logits."""
        self.decoder = decoder
        self._sampler = sampler
        # Fresh pages for megabytes of logits would cost each step more than sampling them.
        self._logits = np.empty((max_rows, decoder.vocab), np.float32)

    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.decoder.copy_block(copy.source, copy.target)
        arrays = step_arrays(plan.rows)
        exact = is_verified_alone(plan.rows)
        if want_best_tokens_alone(plan.rows):
            best = self.decoder.best_tokens(*arrays, deterministic=exact)
            if -1 not in best:
                return best_token_result(plan.rows, best)
            # A row has non-finite logits: compute them again so that the sampler can find it.
        wanted = len(arrays.logit_rows)
        out = self._logits if wanted <= len(self._logits) else None  # prompt logprobs need many rows, once
        logits = self.decoder.execute(*arrays, out, deterministic=exact)
        return step_result(self._sampler, plan.rows, logits)

    def expert_counts(self) -> dict[int, list[int]]:
        return self.decoder.expert_counts()


def is_verified_alone(rows: list[StepRow]) -> bool:
    """Whether the step has the drafts of one sequence and nothing else. Without them it would have one token,
    and that arithmetic is the only one in which a token's result is the same in both."""
    return len(rows) == 1 and bool(rows[0].drafts)


def step_arrays(rows: list[StepRow]) -> StepArrays:
    # Lists up to here: after a forward pass the caches are cold, and each numpy call costs 20 µs.
    ends = list(accumulate(row.count for row in rows))
    tokens = chain.from_iterable(row.tokens for row in rows)
    positions = chain.from_iterable(range(row.start, row.start + row.count) for row in rows)
    return StepArrays(
        token_ids=np.array(list(tokens), np.int32),
        positions=np.array(list(positions), np.int32),
        query_starts=np.array([0, *ends], np.int32),
        block_tables=np.array(_padded([row.seq.block_table for row in rows]), np.int32),
        logit_rows=np.array(_logit_rows(rows, ends), np.int32),
    )


def _padded(tables: list[list[int]]) -> list[list[int]]:
    width = max(map(len, tables))
    return [table + [0] * (width - len(table)) for table in tables]


def _logit_rows(rows: list[StepRow], ends: list[int]) -> list[int]:
    if all(row.samplers and not row.prompt_logprobs and not row.drafts for row in rows):  # nearly every step
        return [end - 1 for end in ends]
    wanted: list[int] = []
    for row, end in zip(rows, ends, strict=True):
        first = logits_from(row)
        if first is not None:
            wanted += range(end - row.count + first, end)
    return wanted
