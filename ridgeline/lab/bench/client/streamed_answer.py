"""StreamedAnswer: parses one streamed answer as its bytes arrive: output chunks with timestamps, usage, the
end.

`client` feeds it bytes with their arrival times; it never reads a clock. Events of one read are one chunk, so
that bundled tokens are visible as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.lab.bench.figures.record import CountedBy, ServerTiming, SplitBy

MAX_LINE_BYTES = 16 << 20


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name
    timing: list[ServerTiming] | None = None  # ours


class _LlamaTimings(msgspec.Struct):
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    predicted_per_token_ms: float | None = None
    cache_n: int | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _LlamaTimings | None = None  # llama-server's
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class Garbage(Exception):
    """Bytes that are not an event stream; the message shows some."""


class StreamedAnswer:
    """chunk_at and chunk_tokens grow together; `settle` makes the counts final at the answer's end."""

    __slots__ = (
        "_has_running_usage",
        "_hidden",
        "_llama",
        "_rest",
        "_texts",
        "_told",
        "_usage",
        "chunk_at",
        "chunk_tokens",
        "counted_by",
        "error",
        "has_events",
        "is_done",
        "is_finished",
        "n_out",
        "split_by",
        "t_first_visible",
    )

    def __init__(self, keep_text: bool = False) -> None:
        self.chunk_at: list[float] = []
        self.chunk_tokens: list[int] = []
        self.t_first_visible: float | None = None
        self.has_events = self.is_done = self.is_finished = False
        self.error = ""  # of an error event
        self.n_out = 0
        self.counted_by: CountedBy = "nothing"
        self.split_by: SplitBy = "one_each"
        self._rest = b""
        self._told = 0
        self._usage: _Usage | None = None
        self._llama: _LlamaTimings | None = None
        self._has_running_usage = False
        self._texts: list[str] | None = [] if keep_text else None
        self._hidden: list[str] = []  # reasoning, where texts are kept

    def feed(self, at: float, data: bytes) -> None:
        """Bytes of the body and their arrival time."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(at, line)
            elif line and not self.has_events and line[:1] not in b":\r" and b":" not in line[:16]:
                raise Garbage(f"not an event stream: {line[:80]!r}")
        if len(self._rest) > MAX_LINE_BYTES:
            raise Garbage(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")

    def _event(self, at: float, line: bytes) -> None:
        if b"[DONE]" in line[:13]:
            self.is_done = True
            return
        try:
            event = _decoder.decode(line[5:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Garbage(f"an event that is not a completion's ({error}): {line[:80]!r}") from None
        self.has_events = True
        if event.error is not None:
            self.error = error_message(event.error)
        visible = hidden = ""
        for choice in event.choices:
            if choice.finish_reason:
                self.is_finished = True
            if choice.text:
                visible = choice.text
            elif choice.delta is not None:
                delta = choice.delta
                visible = "call" if delta.tool_calls else _text(delta.content)
                hidden = delta.reasoning_content or delta.reasoning or ""
        usage = event.usage
        if usage is not None:
            self._usage = usage
        if event.timings is not None:
            self._llama = event.timings
        tokens = 1 if visible or hidden else 0
        # Usage in the first chunk with output is a running count; usage that starts later is the final sum.
        if usage is not None and event.choices and (self._has_running_usage or not self.chunk_at):
            tokens = max(usage.completion_tokens - self._told, 0)
            self._told += tokens
            self._has_running_usage = self._has_running_usage or tokens > 0
        if visible:
            if self.t_first_visible is None:
                self.t_first_visible = at
            if self._texts is not None:
                self._texts.append(visible)
        if hidden and self._texts is not None:
            self._hidden.append(hidden)
        if tokens:
            if self.chunk_at and self.chunk_at[-1] == at:
                self.chunk_tokens[-1] += tokens
            else:
                self.chunk_at.append(at)
                self.chunk_tokens.append(tokens)

    def settle(self, count: Callable[[str], int] | None = None) -> None:
        """Use the counts of the server's usage where given; otherwise report how they are spread over chunks.

        count: tokens of a text, for answers without usage whose text was kept; otherwise chunks are counted.
        """
        seen = sum(self.chunk_tokens)
        told = self._usage.completion_tokens if self._usage is not None else 0
        self.counted_by = "usage"
        if not told and seen and count is not None and self._texts is not None:
            told = sum(count(text) for text in (self.text, "".join(self._hidden)) if text)
            self.counted_by = "tokenizer"
        if not told:
            self.n_out = seen
            self.counted_by = "chunks" if seen else "nothing"
            return
        self.n_out = told
        if self._has_running_usage:
            self.split_by = "usage"
        elif told != seen:
            self.split_by = "spread"
        if told != seen:
            _spread(self.chunk_tokens, told - seen)

    @property
    def text(self) -> str:
        return "".join(self._texts or ())

    @property
    def n_in(self) -> int | None:
        return self._usage.prompt_tokens if self._usage is not None else None

    @property
    def n_cached(self) -> int | None:
        if self._usage is not None:
            if self._usage.prompt_tokens_details is not None:
                return self._usage.prompt_tokens_details.cached_tokens
            if self._usage.prompt_cache_hit_tokens is not None:
                return self._usage.prompt_cache_hit_tokens
        return self._llama.cache_n if self._llama is not None else None

    @property
    def server(self) -> ServerTiming | None:
        if self._usage is not None and self._usage.timing:
            return self._usage.timing[0]
        if self._llama is None:
            return None
        prompt_ms, predicted_ms = self._llama.prompt_ms, self._llama.predicted_ms
        whole = None if prompt_ms is None or predicted_ms is None else prompt_ms + predicted_ms
        return ServerTiming(
            ttft_ms=prompt_ms,
            tpot_ms=self._llama.predicted_per_token_ms,
            inference_ms=whole,
            drafted_tokens=self._llama.draft_n,
            accepted_tokens=self._llama.draft_n_accepted,
        )


def error_message(error: Any) -> str:
    """The message of an error in any of the shapes that servers use."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("error") or error
        return error_message(error) if isinstance(error, dict) and "message" in error else str(error)[:300]
    return str(error)[:300]


def body_message(body: bytes) -> str:
    """The message of an error body, JSON or not."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", errors="replace").strip() or "no reason given"
    return error_message(found.get("error", found) if isinstance(found, dict) else found)


def _text(content: str | list[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _spread(counts: list[int], difference: int) -> None:
    """Distribute tokens not attributed to a chunk over the chunks after the first; take excess tokens from
    the last ones.
    """
    if not counts:
        return
    later = counts[1:] or counts[:1]
    first = len(counts) - len(later)
    if difference > 0:
        each, more = divmod(difference, len(later))
        for place in range(len(later)):
            counts[first + place] += each + (place < more)
        return
    for place in reversed(range(len(counts))):
        taken = min(counts[place], -difference)
        counts[place] -= taken
        difference += taken
