"""StepPlan and StepResult: what one forward pass computes, and what came out of it.

Made by the scheduler from pure data, executed by a runner, replayed by the simulator. No tensors. What is
made anew for every row of every step is a msgspec struct: those cost a fifth of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ridgeline.engine.request import FinishReason, Sequence
from ridgeline.telemetry.timing import TimingRecord


class StepRow(msgspec.Struct, frozen=True):
    """Compute `count` tokens of `seq` from position `start`, writing their KV into seq.block_table.

    samplers: the sequences that take a token from this row's last logits: none for a prefill chunk that
              does not reach the end, [seq] for a decode or a last chunk, all n siblings when a prompt that
              was asked for n samples completes.
    prompt_logprobs: this row must also report log-probabilities of prompt tokens start+1 … start+count
                     (as far as they are prompt tokens).
    """

    seq: Sequence
    start: int
    count: int
    samplers: tuple[Sequence, ...] = ()
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: before the pass, copy one block's KV in every layer."""

    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """What the next forward pass computes. Empty rows: nothing to do."""

    step_id: int
    budget: int  # tokens this step may compute at most
    rows: list[StepRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks while this was planned

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, its rank (1 = most likely) and the asked-for alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


class Sampled(msgspec.Struct, frozen=True):
    """One sampled token; or, with `error`, the reason this sequence (alone) must end."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class RowResult(msgspec.Struct, frozen=True):
    """`samples` are in the order of the row's samplers; prompt_logprobs covers tokens start+1 … of it."""

    samples: list[Sampled] = []
    prompt_logprobs: list[TokenLogprob] = []
    error: str | None = None  # the whole row failed: every sampler of it ends with this error


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows."""

    rows: list[RowResult]


class SeqDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one sequence: what the engine publishes to the request's owner."""

    request_id: str
    index: int
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # which id ended it, when a token did
    error: str | None = None
    timing: TimingRecord | None = None  # with the first token, the first after a preemption, and the end
