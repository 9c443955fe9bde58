"""The engine's output for callers: text chunks as they arrive, or a whole completion.

Used by the in-process `LLM`, the async client and, through it, the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.engine.schedule.request import FinishReason
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.telemetry.timing import TimingRecord


@dataclass(slots=True)  # not frozen: created for every token, and freezing takes three times as long
class OutputChunk:
    """New text of one of the n samples. The last chunk of a sample has `finish_reason` and its `timing`; the
    first has a `timing` that grows with every token, for callers that do not see the last.

    Text may lag behind tokens (an incomplete character, a possible stop string); joined, the chunks' texts
    are exactly the text of the whole completion. `tokens` and `logprobs` stop at the token that ended it.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    timing: TimingRecord | None = None
    error: str | None = None  # with finish_reason "error": what happened to this sample


@dataclass(slots=True)
class Completion:
    """One complete sample."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    timing: TimingRecord | None = None
    error: str | None = None  # with finish_reason "error"


@dataclass(slots=True)
class Generation:
    """A request's answer: its prompt as the model saw it, and n completions."""

    prompt_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.completions[0].text
