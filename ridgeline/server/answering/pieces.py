"""Choices: turns the engine's chunks of one HTTP request into pieces of its numbered choices.

Streamed and whole answers consist of the same pieces in the same order; the endpoints differ only in the
shape they give them. Counts tokens and keeps the timing records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import RequestFailed
from ridgeline.engine.grammar.conformance import AnswerCheck
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.engine.schedule.thinking import ThinkingCount
from ridgeline.server.answering.prompts import Prompt
from ridgeline.server.openai_api.response_bodies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timing,
    Usage,
)
from ridgeline.server.parsing.events import OutputParser, ParsedEvent
from ridgeline.telemetry.timing import TimingRecord
from ridgeline.web.answer_parts import CallArguments, CallStart, Content


class Piece(msgspec.Struct, frozen=True):
    """New text of one choice. `prompt` is set only on the choice's first piece."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    prompt: Prompt | None = None
    prompt_logprobs: list[TokenLogprob] = []  # with `prompt`: from its second token on, if requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: list[ParsedEvent] = []  # from the parser; without a parser, the text as content
    cached_tokens: int = 0  # with `prompt`: tokens found in the prefix cache
    usage: Usage | None = None  # of the whole request so far, if every chunk carries it
    token_ids: list[int] = []  # if requested: all new tokens, also those that show no text

    @property
    def is_text_alone(self) -> bool:
        return self.prompt is None and self.finish_reason is None and not self.logprobs and not self.token_ids

    @property
    def num_characters(self) -> int:
        """Shown by this piece; text that a parser holds back belongs to a later one."""
        return sum(len(part.name if isinstance(part, CallStart) else part.text) for part in self.events)

    @property
    def call_ids(self) -> list[str]:
        return [event.id for event in self.events if isinstance(event, CallStart)]


class Progress(Protocol):
    """Is told of every chunk that became pieces."""

    def note(self, choice: int, chunk: OutputChunk) -> None: ...

    def note_cached(self, prompt: int, tokens: int) -> None: ...


class Parsed:
    """One choice's parser and its findings: calls, and the number of reasoning tokens.

    Reasoning tokens are those between the tags: counted by token, so that the count is the same for every
    division of the answer into chunks.
    """

    def __init__(self, parser: OutputParser, count: ThinkingCount | None) -> None:
        self._parser = parser
        self._count = count
        self.reasoning_tokens = 0
        self._arguments: list[str] = []  # of the last call
        self.has_calls = False
        self.known_ids: list[str] = []  # of the calls that a continued stream has begun

    @property
    def ends_in_a_call(self) -> bool:
        """Whether the last call has begun and its arguments are incomplete."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return self.has_calls
        return False

    def events(self, chunk: OutputChunk) -> list[ParsedEvent]:
        events = self._parser.feed(chunk.text) if chunk.text else []
        if chunk.finish_reason is not None:
            events = events + self._parser.finish()
        for place, event in enumerate(events):
            match event:
                case CallStart():
                    self.has_calls = True
                    self._arguments = []
                    if self.known_ids:
                        events[place] = replace(event, id=self.known_ids.pop(0))
                case CallArguments(text=text):
                    self._arguments.append(text)
        if self._count is not None:
            self._count_reasoning(self._count, chunk)
        return events

    def _count_reasoning(self, count: ThinkingCount, chunk: OutputChunk) -> None:
        for token in chunk.tokens:
            count.advance(token)
        self.reasoning_tokens = count.tokens
        if chunk.finish_reason is not None and count.inside:
            # The token that ends an answer does not count as reasoning.
            by_token = chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str)
            self.reasoning_tokens = count.tokens_at_end() - by_token


@dataclass(slots=True)
class _Source:
    """State of one prompt: its log-probabilities may arrive in several chunks; every choice opens with all of
    them.
    """

    prompt: Prompt
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    held: list[OutputChunk] = field(default_factory=list)
    cached_tokens: int = 0
    is_told: bool = False  # a continued stream has shown its cached tokens


class Choices:
    def __init__(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        new_parser: Callable[[], OutputParser] | None = None,
        running_usage: bool = False,
        new_count: Callable[[], ThinkingCount] | None = None,
        return_token_ids: bool = False,
    ) -> None:
        self._return_token_ids = return_token_ids
        self._sources = [_Source(prompt) for prompt in prompts]
        self._params = params
        self._parsed = (
            None
            if new_parser is None
            else [Parsed(new_parser(), None if new_count is None else new_count()) for _ in range(self.count)]
        )
        self._running_usage = running_usage
        self._checks = [AnswerCheck.of(params.grammar) for _ in range(self.count)]
        self.due_checks: list[AnswerCheck] = []  # of complete answers; their last pieces wait for the check
        self._begun: set[int] = set()
        self._completion_tokens = 0
        self.timings: dict[int, TimingRecord] = {}
        self.finish_reasons: dict[int, str] = {}
        self.outputs: dict[int, list[int]] | None = None  # all tokens by choice, if the texts are recorded
        self.progress: Progress | None = None  # for a stream that a peer can continue

    @property
    def count(self) -> int:
        return len(self._sources) * self._params.n

    def add(self, source_number: int, chunk: OutputChunk, pieces: list[Piece]) -> None:
        """Append what the client may see now. Waits until the prompt's log-probabilities are complete."""
        if self._params.prompt_logprobs is None:
            self._piece(source_number, chunk, pieces)
            return
        source = self._sources[source_number]
        source.prompt_logprobs.extend(chunk.prompt_logprobs)
        source.held.append(chunk)
        first = source_number * self._params.n
        all_begun = all(index in self._begun for index in range(first, first + self._params.n))
        if len(source.prompt_logprobs) < len(source.prompt.ids) - 1 and not all_begun:
            return
        released, source.held = source.held, []
        for held in released:
            self._piece(source_number, held, pieces)

    def restore(self, cached: dict[int, int], call_ids: dict[int, list[str]]) -> None:
        """Before a replay: what a continued stream has shown and its tokens do not tell."""
        for number, tokens in cached.items():
            if 0 <= number < len(self._sources):
                self._sources[number].cached_tokens = tokens
                self._sources[number].is_told = True
        for index, ids in call_ids.items():
            if self._parsed is not None:
                self._parsed[index].known_ids = list(ids)

    def replay(self, index: int, chunk: OutputChunk, pieces: list[Piece]) -> None:
        """A chunk that the client of a continued stream has: prompt's log-probabilities included."""
        number, chunk.index = divmod(index, self._params.n)
        self._piece(number, chunk, pieces)

    def replayed(self) -> None:
        """After the replay. Complete answers were checked before their last pieces were shown."""
        self.due_checks = []

    def has_begun(self, index: int) -> bool:
        return index in self._begun

    def check_complete(self) -> None:
        """Called at the end of the engine's output: every choice must have finished with a visible reason."""
        missing = self.count - len(self.finish_reasons)
        if missing:
            raise RequestFailed(f"the engine ended without finishing {missing} of {self.count} choices")

    def output_tokens(self, index: int) -> int:
        """Output tokens of one choice; unfinished choices share their total evenly."""
        if index in self.timings:
            return self.timings[index].output_tokens
        rest = self._completion_tokens - sum(timing.output_tokens for timing in self.timings.values())
        return max(rest, 0) // (self.count - len(self.timings))

    def usage(self, with_timing: bool) -> Usage:
        prompt_tokens = sum(len(source.prompt.ids) for source in self._sources)
        usage = Usage(
            prompt_tokens,
            self._completion_tokens,
            prompt_tokens + self._completion_tokens,
            PromptTokensDetails(sum(source.cached_tokens for source in self._sources)),
            CompletionTokensDetails(sum(parsed.reasoning_tokens for parsed in self._parsed or ())),
        )
        if not with_timing:
            return usage
        timings = [_timing(index, record) for index, record in sorted(self.timings.items())]
        return msgspec.structs.replace(usage, timing=timings)

    def _piece(self, source_number: int, chunk: OutputChunk, pieces: list[Piece]) -> None:
        index = source_number * self._params.n + chunk.index
        if self.progress is not None:
            self.progress.note(index, chunk)
        if self.outputs is not None:
            self.outputs.setdefault(index, []).extend(chunk.tokens)
        self._completion_tokens += len(chunk.tokens)
        token_ids = chunk.tokens if self._return_token_ids else []
        if index in self._begun and chunk.finish_reason is None and chunk.timing is None:
            # The common case. A chunk with half a character is counted, but shows no text yet.
            events = self._events(index, chunk)
            if chunk.text or chunk.logprobs or token_ids:
                usage = self.usage(False) if self._running_usage else None
                pieces.append(
                    Piece(index, chunk.text, chunk.logprobs, events=events, usage=usage, token_ids=token_ids)
                )
            return
        source = self._sources[source_number]
        if chunk.timing is not None:
            self.timings[index] = chunk.timing
            if not source.is_told:
                source.cached_tokens = max(source.cached_tokens, chunk.timing.cached_tokens)
                if self.progress is not None:
                    self.progress.note_cached(source_number, source.cached_tokens)
        if chunk.finish_reason is not None:
            self._finish(index, chunk)
        events = self._events(index, chunk)
        self._note_check(index, chunk)
        first = index not in self._begun
        self._begun.add(index)
        if not (first or chunk.text or chunk.logprobs or chunk.finish_reason or token_ids):
            return
        pieces.append(
            Piece(
                index,
                chunk.text,
                chunk.logprobs,
                source.prompt if first else None,
                source.prompt_logprobs if first else [],
                self._shown_reason(index, chunk),
                chunk.stop_reason,
                events,
                source.cached_tokens if first else 0,
                self.usage(False) if self._running_usage else None,
                token_ids,
            )
        )

    def _events(self, index: int, chunk: OutputChunk) -> list[ParsedEvent]:
        if self._parsed is None:
            events: list[ParsedEvent] = [Content(chunk.text)] if chunk.text else []
        else:
            events = self._parsed[index].events(chunk)
        check = self._checks[index]
        if check is not None:
            for event in events:
                if isinstance(event, Content):
                    check.add(event.text)
        return events

    def _note_check(self, index: int, chunk: OutputChunk) -> None:
        """Hold the last piece of a complete answer until it is checked; tool calls are not checked."""
        check = self._checks[index]
        complete = chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str)
        if check is not None and complete and not (self._parsed and self._parsed[index].has_calls):
            self.due_checks.append(check)

    def _shown_reason(self, index: int, chunk: OutputChunk) -> str | None:
        """An answer that stopped by itself after calls ends with `tool_calls`. A call cut off by one of the
        client's stop strings does not count.
        """
        if chunk.finish_reason is None:
            return None
        if chunk.finish_reason is FinishReason.STOP and self._parsed and self._parsed[index].has_calls:
            stopped = isinstance(chunk.stop_reason, str) or chunk.stop_reason in self._params.stop_token_ids
            return "stop" if stopped and self._parsed[index].ends_in_a_call else "tool_calls"
        return chunk.finish_reason.value

    def _finish(self, index: int, chunk: OutputChunk) -> None:
        if chunk.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RequestFailed(f"the engine ended choice {index} early ({chunk.finish_reason})")
        self.finish_reasons[index] = chunk.finish_reason.value


def _timing(index: int, record: TimingRecord) -> Timing:
    return Timing(
        index,
        _ms(record.queue_s),
        _ms(record.ttft_s),
        _ms(record.tpot_s),
        _ms(record.inference_s),
        record.preemptions,
        record.drafted_tokens,
        record.accepted_tokens,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
