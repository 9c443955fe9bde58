"""Sources of answers for `run` and `chat`: the engine in this process, or a server at a URL.

Both yield the same pieces of text and, with the last one, the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ridgeline.cli.sampling import Sampling
from ridgeline.engine.config import EngineConfig

if TYPE_CHECKING:
    from ridgeline.engine.client.output import OutputChunk
    from ridgeline.engine.schedule.request import SamplingParams
    from ridgeline.telemetry.timing import TimingRecord

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerStats:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    decode_s: float | None  # first token to last
    e2e_s: float | None
    finish_reason: str
    decode_limit_per_s: float | None = None  # tokens per second that this machine could decode, if known

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: tokens after the first over the time they took."""
        if self.output_tokens < 2 or not self.decode_s:
            return None
        return (self.output_tokens - 1) / self.decode_s

    def line(self) -> str:
        parts = []
        if self.ttft_s is not None:
            parts.append(f"TTFT {1e3 * self.ttft_s:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s{self._share_of_limit(self.tokens_per_s)}")
        parts.append(f"{self.output_tokens} tokens")
        parts.append(f"prompt {self.prompt_tokens} ({self.cached_tokens} cached)")
        parts.append(self.finish_reason)
        return " · ".join(parts)

    def _share_of_limit(self, tokens_per_s: float) -> str:
        limit = self.decode_limit_per_s
        return (
            "" if not limit else f" ({100 * tokens_per_s / limit:.0f}% of this machine's limit, {limit:.0f})"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": _ms(self.ttft_s),
            "decode_ms": _ms(self.decode_s),
            "e2e_ms": _ms(self.e2e_s),
            "tokens_per_s": None if self.tokens_per_s is None else round(self.tokens_per_s, 2),
            "tokens_per_s_limit": None
            if self.decode_limit_per_s is None
            else round(self.decode_limit_per_s, 2),
        }


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    stats: AnswerStats | None = None  # with the last piece


class Answers(Protocol):
    """A source of answers. Closing the iterator early ends the generation behind it."""

    model: str

    def chat(self, messages: list[Message], sampling: Sampling) -> Iterator[Piece]: ...

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]: ...


class LocalAnswers:
    """The engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        from dataclasses import asdict

        from ridgeline.engine.client.llm import LLM

        self.model = config.model
        self._llm = LLM(**asdict(config))
        self._decode_limit_per_s = self._llm.engine.limits.get("decode_tokens_per_s")

    def chat(self, messages: list[Message], sampling: Sampling) -> Iterator[Piece]:
        return _pieces(self._llm.chat_stream(messages, self._params(sampling)), self._decode_limit_per_s)

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        return _pieces(self._llm.generate_stream(prompt, self._params(sampling)), self._decode_limit_per_s)

    def _params(self, sampling: Sampling) -> SamplingParams:
        return sampling.params(self._llm.get_default_sampling_params())


def _pieces(chunks: Iterator[OutputChunk], decode_limit_per_s: float | None) -> Iterator[Piece]:
    with closing(chunks):  # type: ignore[type-var]  # the engine's streams are generators
        for chunk in chunks:
            stats = None
            if chunk.finish_reason is not None and chunk.timing is not None:
                stats = _stats(chunk.timing, chunk.finish_reason.value, decode_limit_per_s)
            yield Piece(chunk.text, stats)


def _stats(timing: TimingRecord, finish_reason: str, decode_limit_per_s: float | None) -> AnswerStats:
    return AnswerStats(
        prompt_tokens=timing.prompt_tokens,
        cached_tokens=timing.cached_tokens,
        output_tokens=timing.output_tokens,
        ttft_s=timing.ttft_s,
        decode_s=timing.decode_s,
        e2e_s=timing.e2e_s,
        finish_reason=finish_reason,
        decode_limit_per_s=decode_limit_per_s,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)
