"""TextStream: turns one sequence's tokens into text and finds stop strings across tokens and chunks.

Runs in the caller's process, never in the engine loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.models.text.detokenizer import IncrementalDetokenizer
from ridgeline.telemetry.timing import TimingRecord

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer


class TextStream:
    """Feed it a sequence's deltas in order; it returns chunks whose joined texts are the completion.

    Text that may be the start of a stop string is held back until the next tokens decide. After a stop string
    matched (`stopped_by_text`) the caller aborts the sequence; what the engine sends until then is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special=not params.show_special)
        self._params = params
        self._index = index
        self._held = ""
        self._num_tokens = 0
        self._token_times: list[float] = []
        self._timing: TimingRecord | None = None
        self._drafted = self._accepted = 0
        self.finished = False
        self.stopped_by_text = False

    def push(self, delta: SeqDelta, step_end: float) -> OutputChunk | None:
        """The delta as text; None if there is nothing to report yet."""
        if self.finished:
            return None
        if delta.drafted:
            self._drafted += delta.drafted
            self._accepted += delta.accepted
        if self._is_one_more_token(delta):
            self._num_tokens += 1
            self._token_times.append(step_end)
            text = self._detokenizer.push_one(delta.tokens[0])
            return OutputChunk(self._index, text, delta.tokens, delta.logprobs)
        self._timing = delta.timing or self._timing
        texts: list[str] = []
        for position, token in enumerate(delta.tokens):
            self._num_tokens += 1
            self._token_times.append(step_end)
            text = self._text_of(token, delta)
            if self._params.stop:
                text, matched = self._scan(text, last=False)
                if matched is not None:
                    return self._stop_at(delta, position, "".join(texts) + text, matched)
            texts.append(text)
        if delta.finish_reason is not None:
            return self._end(delta, "".join(texts))
        if not delta.tokens and not delta.prompt_logprobs:
            return None
        # The record shares its list of token times with us: it stays valid until the final one replaces it.
        so_far = replace(delta.timing, token_times=self._token_times) if delta.timing else None
        return OutputChunk(
            self._index,
            "".join(texts),
            delta.tokens,
            delta.logprobs,
            delta.prompt_logprobs,
            timing=so_far,
        )

    def replay(self, deltas: Iterable[SeqDelta]) -> list[OutputChunk]:
        """Push what was generated elsewhere, without its times."""
        chunks = [chunk for delta in deltas if (chunk := self.push(delta, 0.0)) is not None]
        self._token_times = []
        return chunks

    def _is_one_more_token(self, delta: SeqDelta) -> bool:
        """Nearly every delta: a token in the middle of an answer, with no stop string to look for."""
        return (
            len(delta.tokens) == 1
            and delta.finish_reason is None
            and delta.timing is None
            and not delta.prompt_logprobs
            and not self._params.stop
        )

    def _text_of(self, token: int, delta: SeqDelta) -> str:
        """The token that ended the sequence is counted but not shown, unless requested."""
        if token == delta.stop_token and not self._params.include_stop:
            return ""
        return self._detokenizer.push_one(token)

    def _scan(self, text: str, last: bool) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string found in it, if any."""
        pending = self._held + text
        if self._num_tokens <= self._params.min_tokens and not last:
            # Before min_tokens nothing stops, and a later match must not reach back into this text.
            self._held = ""
            return pending, None
        found = [(pending.find(stop), stop) for stop in self._params.stop if stop in pending]
        if found:
            at, stop = min(found)
            self._held = ""
            return pending[: at + len(stop) if self._params.include_stop else at], stop
        keep = 0 if last else _longest_partial(pending, self._params.stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def _stop_at(self, delta: SeqDelta, position: int, text: str, matched: str) -> OutputChunk:
        self.finished = self.stopped_by_text = True
        return OutputChunk(
            self._index,
            text,
            delta.tokens[: position + 1],
            delta.logprobs[: position + 1],
            delta.prompt_logprobs,
            FinishReason.STOP,
            matched,
            self._timing_until_now(),
        )

    def _end(self, delta: SeqDelta, text: str) -> OutputChunk:
        self.finished = True
        tail, matched = self._scan(self._detokenizer.finish(), last=True)
        reason = FinishReason.STOP if matched is not None else delta.finish_reason
        return OutputChunk(
            self._index,
            text + tail,
            delta.tokens,
            delta.logprobs,
            delta.prompt_logprobs,
            reason,
            matched if matched is not None else delta.stop_token,
            self._timing_until_now() if matched is not None else delta.timing,
            delta.error,
        )

    def _timing_until_now(self) -> TimingRecord | None:
        """The engine did not end it, so the record is cut at the token that completed the stop string."""
        if self._timing is None:
            return None
        return replace(
            self._timing,
            token_times=self._token_times,
            end=self._token_times[-1] if self._token_times else self._timing.arrival,
            end_reason=FinishReason.STOP.value,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )


def _longest_partial(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of `text` could be the start of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
