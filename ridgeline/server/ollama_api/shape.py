"""OllamaShape: pieces as lines of JSON, or as one answer, for /api/chat or /api/generate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import UNSET

from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Piece
from ridgeline.server.errors import ErrorReply
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.ollama_api.bodies import (
    OllamaCall,
    OllamaCalled,
    OllamaChatLine,
    OllamaError,
    OllamaGenerateLine,
    OllamaSaid,
)
from ridgeline.server.openai_api.logprobs import TokenNames, chat_logprobs
from ridgeline.server.openai_api.response_bodies import ChatLogprob, Usage, encode
from ridgeline.server.parsing.events import ParsedEvent
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from ridgeline.web.tool_input import ToolInput

NS_PER_MS = 1_000_000


def now() -> str:
    return stamp(datetime.now(UTC))


def stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class LineContent:
    """The content of one line."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)


class GrowingCalls:
    """Emits a call when it is complete: its arguments are an object."""

    def __init__(self) -> None:
        self._start: CallStart | None = None
        self._texts: list[str] = []
        self._input = ToolInput()

    def begin(self, start: CallStart) -> None:
        self._start, self._texts, self._input = start, [], ToolInput()

    def add(self, text: str) -> None:
        self._texts.append(self._input.add(text))

    def end(self, cut: bool) -> list[OllamaCall]:
        """The open call, if any. `cut`: the answer ended inside it."""
        start, self._start = self._start, None
        if start is None:
            return []
        text = "".join([*self._texts, self._input.end(cut)])
        arguments = cast(dict[str, Any], msgspec.Raw(text.encode()))
        return [
            OllamaCall(
                id=start.id, function=OllamaCalled(index=start.index, name=start.name, arguments=arguments)
            )
        ]


class OllamaShape:
    """`is_chat`: messages, otherwise only the text. `shows_thinking`: the client did not turn it off."""

    def __init__(self, context: RequestContext, job: Job, is_chat: bool, shows_thinking: bool) -> None:
        self._model = job.served.name
        self._arrival = context.arrival
        self._names = TokenNames(job.client.tokenizer)
        self._is_chat = is_chat
        self._shows_thinking = shows_thinking
        self._calls = GrowingCalls()
        self._reason = "stop"

    @property
    def keepalive(self) -> bytes:
        """A line without text: clients parse every line as JSON."""
        return self._line(LineContent())

    def opening(self) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        return b"".join([self._line(said) for said in self._said(piece)])

    def closing(self, usage: Usage) -> bytes:
        return self._line(LineContent(), **self._ending(usage))

    def failure(self, reply: ErrorReply) -> bytes:
        return encode(OllamaError(reply.shown_message())) + b"\n"

    def whole(self, pieces: list[Piece], usage: Usage) -> Any:
        """The stream's lines, joined: whole and streamed cannot differ."""
        parts = [said for piece in pieces for said in self._said(piece)]
        joined = LineContent(
            "".join(part.content for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.calls],
            [token for part in parts for token in part.logprobs],
        )
        return self._body(joined, **self._ending(usage))

    def _said(self, piece: Piece) -> list[LineContent]:
        said: list[LineContent] = []
        for event in piece.events:
            self._add(event, said)
        if piece.finish_reason is not None:
            self._reason = "length" if piece.finish_reason == "length" else "stop"
            said += [LineContent(calls=[call]) for call in self._calls.end(cut=self._reason == "length")]
        if piece.logprobs:
            said = said or [LineContent()]
            said[0].logprobs = chat_logprobs(self._names, piece.logprobs)
        return said

    def _add(self, event: ParsedEvent, said: list[LineContent]) -> None:
        if not isinstance(event, CallArguments):
            said += [LineContent(calls=[call]) for call in self._calls.end(cut=False)]
        match event:
            case Content(text):
                said.append(LineContent(content=text))
            case Reasoning(text):
                if self._shows_thinking:
                    said.append(LineContent(thinking=text))
            case CallStart():
                self._calls.begin(event)
            case CallArguments(text):
                self._calls.add(text)

    def _line(self, said: LineContent, **ending: Any) -> bytes:
        return encode(self._body(said, **ending)) + b"\n"

    def _body(self, said: LineContent, **ending: Any) -> OllamaChatLine | OllamaGenerateLine:
        head = {
            "model": self._model,
            "created_at": now(),
            "logprobs": said.logprobs or UNSET,
            "done": False,
            **ending,
        }
        thinking = said.thinking or UNSET
        if not self._is_chat:
            return OllamaGenerateLine(**head, response=said.content, thinking=thinking)
        message = OllamaSaid(content=said.content, thinking=thinking, tool_calls=said.calls or UNSET)
        return OllamaChatLine(**head, message=message)

    def _ending(self, usage: Usage) -> dict[str, Any]:
        timing = usage.timing[0] if usage.timing else None
        prefill_ms = (timing.ttft_ms or 0.0) - (timing.queue_ms or 0.0) if timing else 0.0
        inference_ms = (timing.inference_ms or 0.0) if timing else 0.0
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": int((time.monotonic() - self._arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(prefill_ms, 0.0) * NS_PER_MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(inference_ms - prefill_ms, 0.0) * NS_PER_MS),
        }
