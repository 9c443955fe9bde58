"""Runner: owns the device state (weights, KV cache) and turns a StepPlan into one forward pass.

It never decides what runs. One implementation per backend family: `native_runner` for the CPU library,
`torch_runner` for the reference. What both do with the logits is here; nothing here imports either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from ridgeline.engine.plan.request import SamplingParams, Sequence
from ridgeline.engine.plan.step import RowResult, Sampled, StepPlan, StepResult, StepRow
from ridgeline.engine.run.sampler import Logits, Sampler


class Runner(Protocol):
    """What the engine needs of a backend."""

    name: str

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. KV writes are idempotent: a row may safely be executed again.

        Before anything that can fail, a runner that keeps something for each sequence drops what it keeps
        for those in `plan.retired`: nobody is named twice for one end.
        """
        ...


@runtime_checkable
class DeviceRunner(Runner, Protocol):
    """A backend whose device computes while the host plans the next step."""

    lookahead: int  # steps that may be launched before the oldest in flight is collected: 0 or 1

    def launch(self, plan: StepPlan) -> Any:
        """Hand the plan to the device and return a ticket for its result, without waiting.

        Steps take effect in the order of their launches. No token or block table of its sequences is read
        after this returns. Raises DeviceOutOfMemory where there is no memory for it, and DeviceLost where
        the device is beyond help; after any other failure the plan may be launched again, whole or in parts.
        """
        ...

    def complete(self, ticket: Any) -> None:
        """All steps before this one have been applied: launch what had to wait for that, without waiting.

        That is the choice of tokens where a grammar must have seen the last one. Called once for each ticket,
        before the next launch. Who has ended meanwhile is under no grammar any more. Fails as `launch` does.
        """
        ...

    def refusal(self, params: SamplingParams) -> tuple[str, str] | None:
        """(field, why) where the device cannot serve these parameters; asked before a request is queued."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for the step's result. Tickets come in the order of their launches; after a Ctrl-C never."""
        ...

    def idle(self) -> bool:
        """There is nothing to compute: do a little of what can be done ahead. True: there is more of that."""
        ...


def logits_from(row: StepRow) -> int | None:
    """The first of the row's tokens whose logits are wanted, to its end: all, the last one, or none."""
    if row.prompt_logprobs:
        return 0
    return row.count - 1 if row.samplers else None


def logit_spans(rows: list[StepRow]) -> list[range]:
    """For each row, which rows of the step's logits are its own."""
    spans: list[range] = []
    end = 0
    for row in rows:
        begin, first = end, logits_from(row)
        end += 0 if first is None else row.count - first
        spans.append(range(begin, end))
    return spans


def want_best_tokens_alone(rows: list[StepRow]) -> bool:
    """Nobody in these rows needs more of the logits than which is the largest."""
    for row in rows:
        if row.prompt_logprobs or any(len(seq.tokens) < seq.argmax_from for seq in row.samplers):
            return False
    return True


def best_token_result(rows: list[StepRow], best: list[int]) -> StepResult:
    """What `step_result` gives where all want the best token alone; `best` is of the rows that sample."""
    tokens = iter(best)
    return StepResult(
        [RowResult([Sampled(next(tokens))] * len(row.samplers) if row.samplers else []) for row in rows]
    )


def step_result(sampler: Sampler, rows: list[StepRow], logits: Logits) -> StepResult:
    """Sample every row that samples and score the prompts that asked for it. Logits are read, never kept."""
    spans = logit_spans(rows)
    picks: list[tuple[int, Sequence]] = []
    for row, span in zip(rows, spans, strict=True):
        picks += [(span[-1], seq) for seq in row.samplers]
    sampled = iter(sampler.sample(logits, picks))
    return StepResult(
        [_row_result(sampler, row, span, logits, sampled) for row, span in zip(rows, spans, strict=True)]
    )


def _row_result(
    sampler: Sampler, row: StepRow, span: range, logits: Logits, sampled: Iterator[Sampled]
) -> RowResult:
    samples = [next(sampled) for _ in row.samplers]
    if not row.prompt_logprobs:
        return RowResult(samples)
    targets = row.seq.tokens[row.start + 1 : min(row.start + row.count + 1, row.seq.prompt_len)]
    count = row.seq.params.prompt_logprobs or 0
    predicted = sampler.prompt_logprobs(logits[span.start : span.start + len(targets)], targets, count)
    return RowResult(samples, predicted)
