"""MessagesShape: pieces as Anthropic's events, or as one message. One per request, created by `handlers`."""

from __future__ import annotations

import msgspec

from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Piece
from ridgeline.server.errors import ErrorReply
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.messages_api.blocks import Blocks, ThinkingShown, folded
from ridgeline.server.messages_api.bodies import (
    BlockStep,
    DeltaUsage,
    Ending,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    StopReason,
)
from ridgeline.server.messages_api.errors import messages_error
from ridgeline.server.openai_api.response_bodies import Usage, encode


def event(body: MessageEvent) -> bytes:
    name = body.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + encode(body) + b"\n\n"


PING = event(Ping())


class MessagesShape:
    def __init__(
        self, context: RequestContext, job: Job, thinking: ThinkingShown, fills_context: bool
    ) -> None:
        """fills_context: max_tokens exceeds the remaining context, so the context is the limit."""
        self._request_id = context.request_id
        self._model = job.served.name
        self._stops = job.params.stop
        self._blocks = Blocks(thinking)
        self._at_limit: StopReason = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._ending = Ending("end_turn", None)

    def opening(self) -> bytes:
        return b""  # the message starts with its first piece, which has the cached token count

    def events(self, piece: Piece) -> bytes:
        opening = self._start(piece) if piece.prompt is not None else b""
        return opening + b"".join([event(step) for step in self._steps(piece)])

    def closing(self, usage: Usage) -> bytes:
        told = _usage(usage)
        delta_usage = DeltaUsage(
            input_tokens=told.input_tokens,
            cache_read_input_tokens=told.cache_read_input_tokens,
            output_tokens=told.output_tokens,
            output_tokens_details=told.output_tokens_details,
        )
        return event(MessageDelta(self._ending, delta_usage)) + event(MessageStop())

    def failure(self, reply: ErrorReply) -> bytes:
        return event(messages_error(reply, self._request_id))

    def whole(self, pieces: list[Piece], usage: Usage) -> MessageAnswer:
        steps = [step for piece in pieces for step in self._steps(piece)]
        whole = self._message(_usage(usage))
        ending = self._ending
        return msgspec.structs.replace(
            whole,
            content=folded(steps),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
        )

    def _start(self, piece: Piece) -> bytes:
        assert piece.prompt is not None
        usage = MessageUsage(
            input_tokens=len(piece.prompt.ids) - piece.cached_tokens,
            cache_read_input_tokens=piece.cached_tokens,
            output_tokens=0,
            output_tokens_details=OutputTokensDetails(0),
        )
        return event(MessageStart(self._message(usage))) + PING

    def _message(self, usage: MessageUsage) -> MessageAnswer:
        """The message without content, as a stream begins."""
        return MessageAnswer(
            id=f"msg_{self._request_id}",
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )

    def _steps(self, piece: Piece) -> list[BlockStep]:
        steps = self._blocks.add(piece.events)
        if piece.finish_reason is not None:
            self._ending = self._ending_of(piece)
            cut = self._ending.stop_reason not in ("end_turn", "tool_use")
            steps += self._blocks.end(cut)
        return steps

    def _ending_of(self, piece: Piece) -> Ending:
        if piece.finish_reason == "length":
            return Ending(self._at_limit, None)
        if isinstance(piece.stop_reason, str) and piece.stop_reason in self._stops:
            return Ending("stop_sequence", piece.stop_reason)
        return Ending("tool_use" if piece.finish_reason == "tool_calls" else "end_turn", None)


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
    )
