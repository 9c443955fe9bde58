"""Runner: owns the device state (weights, KV cache) and turns a StepPlan into one forward pass.

It never decides what runs. One implementation per backend: `native_runner` for the CPU library,
`torch_runner` for the reference, `cuda.runner` for GPUs (a `DeviceRunner`: it launches a step before
the last one is read). The first two share the handling of logits here; this module imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from ridgeline.engine.run.host_sampler import HostSampler, Logits, wants_best_token
from ridgeline.engine.schedule.request import SamplingParams, Sequence
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult, StepRow


class Runner(Protocol):
    """The interface of a backend."""

    name: str

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. KV writes are idempotent: a row may safely be executed again.

        A runner that keeps state per sequence first drops the state of those in `plan.retired`, before
        anything that can fail: a sequence is reported as retired once.
        """
        ...


@runtime_checkable
class CountsExperts(Protocol):
    """A backend that counts the experts its tokens choose."""

    def expert_counts(self) -> dict[int, list[int]]:
        """For each layer with experts, the tokens that chose each of them; empty without experts.

        Called a few times a minute, between steps; a step that runs on the device may be counted in part.
        """
        ...


@runtime_checkable
class DeviceRunner(Runner, Protocol):
    """A backend whose device computes while the host plans the next step."""

    lookahead: int  # steps that may be launched before the oldest in flight is collected: 0 or 1
    most_samples: int  # of one step, those behind drafts included

    def launch(self, plan: StepPlan) -> Any:
        """Start the plan on the device and return the launched step, without waiting.

        Steps take effect in launch order. The tokens and block tables of its sequences are not read after
        this returns. Raises DeviceOutOfMemory if the device lacks memory, and DeviceLost if it cannot
        recover; after any other error the plan may be launched again, whole or in parts.
        """
        ...

    def complete(self, launched: Any) -> None:
        """Launch the part of the step that needed all earlier steps to be applied, without waiting.

        That is the sampling of tokens under a grammar or at the end of a thinking budget, for which the last
        token must be known. Called once for each step, before the next launch. A sequence that finished since
        then has no mask. Fails like `launch`.
        """
        ...

    def refusal(self, params: SamplingParams) -> tuple[str, str] | None:
        """(field, reason) if the device cannot serve these parameters; called before a request is queued."""
        ...

    def collect(self, launched: Any) -> StepResult:
        """Wait for the step's result. Steps are collected in launch order, or never after a Ctrl-C."""
        ...

    def idle(self) -> bool:
        """Nothing to compute: do a small piece of work ahead. Returns True if there is more of it."""
        ...


@runtime_checkable
class TapsHidden(Protocol):
    """A backend that reports hidden states of its model, for a draft head."""

    def tap(self, layers: tuple[int, ...]) -> None:
        """From the next step on, keep the inputs of these layers. Before the first step."""
        ...

    def tapped(self) -> list[Any]:
        """Of the last step that was collected, for each row of its plan: a tensor [count, taps · hidden]."""
        ...

    def on_stream(self) -> AbstractContextManager[None]:
        """Where work on those tensors must be launched."""
        ...


def logits_from(row: StepRow) -> int | None:
    """The first of the row's tokens whose logits are needed, up to its end: all, the last one and its
    drafts, or none."""
    if row.prompt_logprobs:
        return 0
    return row.count - 1 - len(row.drafts) if row.samplers else None


def logit_spans(rows: list[StepRow]) -> list[range]:
    """For each row, its rows of the step's logits."""
    spans: list[range] = []
    end = 0
    for row in rows:
        begin, first = end, logits_from(row)
        end += 0 if first is None else row.count - first
        spans.append(range(begin, end))
    return spans


def want_best_tokens_alone(rows: list[StepRow]) -> bool:
    """Whether every sequence in these rows needs only the best token, after each of its drafts too."""
    return all(
        not row.prompt_logprobs
        and all(map(wants_best_token, row.samplers))
        and not (row.drafts and row.seq.thinking is not None)
        for row in rows
    )


def best_token_result(rows: list[StepRow], best: list[int]) -> StepResult:
    """The same as `step_result` if all rows need only the best token; `best` has the sampling rows."""
    tokens = iter(best)
    return StepResult(
        [
            best_until_wrong(row, list(islice(tokens, 1 + len(row.drafts))))
            if row.drafts
            else RowResult([Sampled(next(tokens))] * len(row.samplers) if row.samplers else [])
            for row in rows
        ]
    )


def best_until_wrong(row: StepRow, best: list[int]) -> RowResult:
    """The best token after each draft, up to the first one that is not the draft or ends the sequence."""
    wrong = next((place for place, draft in enumerate(row.drafts) if best[place] != draft), len(row.drafts))
    end_ids = row.seq.end_ids  # such a sequence has its min_tokens
    ended = next((place for place in range(wrong) if best[place] in end_ids), wrong)
    return RowResult([Sampled(token) for token in best[: ended + 1]])


def step_result(sampler: HostSampler, rows: list[StepRow], logits: Logits) -> StepResult:
    """Sample every row that samples and score the requested prompts. Logits are read, never kept."""
    spans = logit_spans(rows)
    picks: list[tuple[int, Sequence]] = []
    for row, span in zip(rows, spans, strict=True):
        if not row.drafts:
            picks += [(span[-1], seq) for seq in row.samplers]
    sampled = iter(sampler.sample(logits, picks))
    return StepResult(
        [_row_result(sampler, row, span, logits, sampled) for row, span in zip(rows, spans, strict=True)]
    )


def _row_result(
    sampler: HostSampler, row: StepRow, span: range, logits: Logits, sampled: Iterator[Sampled]
) -> RowResult:
    if row.drafts:
        return RowResult(sampler.verify(logits[span.start : span.stop], row.seq, row.drafts))
    samples = [next(sampled) for _ in row.samplers]
    if not row.prompt_logprobs:
        return RowResult(samples)
    targets = row.seq.tokens[row.start + 1 : min(row.start + row.count + 1, row.seq.prompt_len)]
    count = row.seq.params.prompt_logprobs or 0
    predicted = sampler.prompt_logprobs(logits[span.start : span.start + len(targets)], targets, count)
    return RowResult(samples, predicted)
