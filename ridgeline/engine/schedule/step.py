"""StepPlan and StepResult: the input and the output of one forward pass.

Made by the scheduler from pure data, executed by a runner, replayed by the simulator. No tensors. The types
created for every row of every step are not frozen, though they are never changed: freezing them takes three
times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ridgeline.engine.schedule.request import FinishReason, Sequence
from ridgeline.telemetry.timing import TimingRecord

_NONE: Any = ()  # an immutable empty list


@dataclass(slots=True)
class StepRow:
    """Compute `count` tokens of `seq` from position `start`, writing their KV into seq.block_table.

    In a step launched ahead, the token at `start` may be one that a step in flight is still sampling. Then
    count is 1, `seq.tokens` ends just before `start`, and the runner reads the token on the device, where
    that step leaves it. The rest of `seq` that a launch needs (earlier tokens, block table) is complete.

    samplers: the sequences that sample from this row's last logits: none for a prefill chunk that does not
              reach the end, [seq] for a decode or a last chunk, all n siblings when the prompt of a
              request with n samples completes.
    prompt_logprobs: this row must also report log-probabilities of prompt tokens start+1 … start+count
                     (as far as they are prompt tokens).
    drafts: guesses of the tokens that follow the one at `start`; `count` includes them. The runner returns
            the token that `seq` draws after each of them, up to the first one that is not the guess.
    """

    seq: Sequence
    start: int
    count: int
    samplers: tuple[Sequence, ...] = ()
    prompt_logprobs: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The ids of its `count` tokens, as far as the host knows them."""
        known = self.seq.tokens[self.start : self.start + self.count]
        return [*known, *self.drafts] if self.drafts else known


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: before the pass, copy one block's KV in every layer."""

    source: int
    target: int


class StepWork(NamedTuple):
    """A step as a cost model sees it: how much is computed, over how much context."""

    prefill_tokens: int = 0
    prefill_rows: int = 0
    prefill_context_product: int = 0  # Σ chunk · context: the cost of prefill attention
    decode_batch: int = 0
    decode_context: int = 0  # Σ KV tokens read by decode rows


@dataclass(slots=True)
class StepPlan:
    """What the next forward pass computes. Empty rows: nothing to do.

    preempted: lost their blocks while this was planned
    retired:   finished or preempted since the last plan with rows, and in no step in flight. A runner drops
               the state it keeps for them before it computes this plan. A preempted sequence may return, even
               in this plan, and then starts with new state. The runner may not know a retired sequence,
               if the launch that would have been its first one failed.
    """

    step_id: int
    budget: int  # most tokens this step may compute
    rows: list[StepRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    retired: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def work(self) -> StepWork:
        prefill_tokens = prefill_rows = context_product = decode_batch = decode_context = 0
        for row in self.rows:
            context = row.start + row.count
            if row.count == 1 and row.start > 0:
                decode_batch += 1
                decode_context += context
            elif row.drafts:  # each of its tokens is computed like a decode
                decode_batch += row.count
                decode_context += row.count * context
            else:
                prefill_rows += 1
                prefill_tokens += row.count
                context_product += row.count * context
        return StepWork(prefill_tokens, prefill_rows, context_product, decode_batch, decode_context)

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, its rank (1 = most likely) and the requested alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """One sampled token, or, with `error`, the reason why this sequence must end."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(slots=True)
class RowResult:
    """`samples` are in the order of the row's samplers; prompt_logprobs covers tokens start+1 … of it.

    Of a row with drafts, `samples` are consecutive tokens of its only sampler: at least one, and one more for
    each draft that was right.
    """

    samples: list[Sampled] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None  # the whole row failed: every sampler of it ends with this error


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows."""

    rows: list[RowResult]


class SeqDelta(NamedTuple):
    """What one step added to one sequence. The engine sends it to the request's client.

    A tuple, because it is sent over the socket as an array. Its lists must not be changed.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called
    tokens: list[int] = _NONE
    logprobs: list[TokenLogprob] = _NONE
    prompt_logprobs: list[TokenLogprob] = _NONE
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the id that ended it, if a token did
    error: str | None = None
    timing: TimingRecord | None = None  # with the first token, the first after a preemption, and the end
    drafted: int = 0  # with the first token of a row that had drafts: how many, and how many were right
    accepted: int = 0
