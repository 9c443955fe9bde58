"""Reads the token counts that upstreams report, under any of their names, into a Usage.

Called with whole answers by the pipeline, and with single events by `UsageReader`. Reads only counts.
"""

from __future__ import annotations

import msgspec

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.dialects.families import shape_of
from ridgeline.gateway.dialects.streams.events import payload_of, split


class Details(msgspec.Struct):
    audio_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    thinking_tokens: int | None = None


class Counts(msgspec.Struct):
    """Every name of a count in any family. None: not reported."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    input_token_details: Details | None = None  # of transcriptions
    output_token_details: Details | None = None
    seconds: float | None = None  # of transcriptions that are billed by their length
    prompt_audio_seconds: float | None = None  # Mistral's

    @property
    def tells(self) -> bool:
        """Whether any count is reported: an answer to a prompt uses more than 0 tokens."""
        return any(getattr(self, name) for name in self.__struct_fields__)

    def usage(self) -> Usage:
        if self.cache_read_input_tokens is not None or self.cache_creation_input_tokens is not None:
            return self._anthropic()
        inner_in = (
            self.prompt_tokens_details or self.input_tokens_details or self.input_token_details or _NO_DETAILS
        )
        inner_out = (
            self.completion_tokens_details
            or self.output_tokens_details
            or self.output_token_details
            or _NO_DETAILS
        )
        tokens_out = self.completion_tokens or self.output_tokens or 0
        tokens_in = self.prompt_tokens or self.input_tokens or 0
        total = self.total_tokens or 0
        if not tokens_in and not tokens_out:
            tokens_in = total  # for reranking, some servers report only the sum
        reasoning = inner_out.reasoning_tokens or inner_out.thinking_tokens or 0
        if reasoning and total == tokens_in + tokens_out + reasoning:
            tokens_out += reasoning  # xAI and Gemini count it apart from the answer; here it is part of it
        return Usage(
            tokens_in,
            inner_in.cached_tokens or self.prompt_cache_hit_tokens or 0,
            inner_in.cache_write_tokens or 0,
            tokens_out,
            reasoning,
            "reported",
            inner_in.audio_tokens or 0,
            inner_out.audio_tokens or 0,
            round((self.seconds or self.prompt_audio_seconds or 0.0) * 1000),
        )

    def _anthropic(self) -> Usage:
        """Anthropic's input_tokens exclude tokens read from or written to the cache."""
        read, written = self.cache_read_input_tokens or 0, self.cache_creation_input_tokens or 0
        inner = self.output_tokens_details or _NO_DETAILS
        return Usage(
            (self.input_tokens or 0) + read + written,
            read,
            written,
            self.output_tokens or 0,
            inner.thinking_tokens or inner.reasoning_tokens or 0,
            "reported",
        )

    def updated(self, later: Counts) -> Counts:
        """These counts updated with `later`. A stream's counts are running sums, so the last one wins; but
        some servers end with an input of 0 after they have reported the true one.
        """
        told = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        if not later.input_tokens and not later.cache_read_input_tokens:
            for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
                if getattr(self, name) is not None:
                    told.pop(name, None)
        return msgspec.structs.replace(self, **told)


class CohereTokens(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None


class CohereMeta(msgspec.Struct):
    tokens: CohereTokens | None = None


class AnswerUsage(msgspec.Struct):
    """The fields of a whole answer that may hold its counts."""

    usage: Counts | None = None
    meta: CohereMeta | None = None
    duration: float | str | None = None  # seconds, of a transcription in OpenAI's verbose_json


AUDIO = frozenset({"speech", "transcriptions", "translations"})
_NO_DETAILS = Details()
_COUNTED = frozenset(
    {"chat", "completions", "responses", "messages", "embeddings", "rerank", "score"} | AUDIO
)
_answers = msgspec.json.Decoder(AnswerUsage)


def usage_of(kind: str, family: str, body: bytes) -> Usage | None:
    """The usage that a whole answer reports, or None. `family`: of these bytes."""
    if shape_of(kind, family) not in _COUNTED:
        return None
    if kind in AUDIO and body.startswith((b"data:", b"event:")):  # streamed, and relayed whole
        told = (usage_of(kind, family, payload_of(event)) for event in reversed(split(body)))
        return next((one for one in told if one is not None), None)
    if kind in AUDIO and not body.startswith(b"{"):
        return None  # audio, or plain text
    try:
        answer = _answers.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if answer.usage is not None and answer.usage.tells:
        return answer.usage.usage()
    if answer.meta is not None and answer.meta.tokens is not None:
        tokens = answer.meta.tokens
        return Usage(tokens.input_tokens or 0, tokens_out=tokens.output_tokens or 0, source="reported")
    if kind in AUDIO and answer.duration is not None:
        return Usage(audio_ms=_milliseconds(answer.duration), source="reported")
    return None


def _milliseconds(seconds: float | str) -> int:
    try:
        return max(round(float(seconds) * 1000), 0)
    except (ValueError, OverflowError):
        return 0
