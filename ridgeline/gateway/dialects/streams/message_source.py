"""MessageSource: reads Anthropic's messages and their events into steps."""

from __future__ import annotations

import msgspec

from ridgeline.gateway.dialects.counts import Counts
from ridgeline.gateway.dialects.error_bodies import Told
from ridgeline.gateway.dialects.streams.events import payload_of
from ridgeline.gateway.dialects.streams.steps import (
    Begin,
    Counted,
    Done,
    End,
    Failed,
    Ping,
    Reason,
    Redacted,
    Signature,
    Step,
    unreadable,
)
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

_REASONS: dict[str, Reason] = {
    "end_turn": "stop",
    "pause_turn": "stop",
    "stop_sequence": "stop_sequence",
    "max_tokens": "length",
    "model_context_window_exceeded": "context",
    "tool_use": "tool_calls",
    "refusal": "refusal",
}
_EMPTY = msgspec.Raw(b"{}")


class Block(msgspec.Struct):
    """A content block of any type; blocks of tools that Anthropic runs cannot occur."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = _EMPTY


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct):
    id: str = ""
    model: str = ""
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Counts | None = None


class _Event(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    content_block: Block | None = None
    delta: _Delta | None = None
    usage: Counts | None = None
    error: Told | None = None


_events = msgspec.json.Decoder(_Event)
_messages = msgspec.json.Decoder(_Message)


class MessageSource:
    def __init__(self) -> None:
        self._counts = Counts()
        self._input: bytes | None = None  # of the open tool_use block, until its first delta

    def whole(self, body: bytes) -> list[Step]:
        try:
            message = _messages.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise unreadable() from None
        steps = self._begun(message)
        for block in message.content:
            steps += self._block(block)
            steps += self._block_end()
        return [*steps, *self._end(message.stop_reason, message.stop_sequence), Done()]

    def event(self, event: bytes) -> list[Step]:
        payload = payload_of(event)
        if not payload:
            return [Ping()] if event.startswith(b":") else []
        try:
            told = _events.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            raise unreadable() from None
        match told.type:
            case "content_block_delta" if told.delta is not None:
                return self._delta(told.delta)
            case "content_block_start" if told.content_block is not None:
                return self._block(told.content_block)
            case "content_block_stop":
                return self._block_end()
            case "message_start" if told.message is not None:
                return self._begun(told.message)
            case "message_delta":
                return self._ending(told)
            case "message_stop":
                return [Done()]
            case "ping":
                return [Ping()]
            case "error":
                return [Failed(told.error or Told("the upstream failed"))]
        return []

    def _begun(self, message: _Message) -> list[Step]:
        return [Begin(message.id.removeprefix("msg_"), message.model), *self._count(message.usage)]

    def _block(self, block: Block) -> list[Step]:
        match block.type:
            case "text" if block.text:
                return [Content(block.text)]
            case "thinking":
                steps: list[Step] = [Reasoning(block.thinking)] if block.thinking else []
                return [*steps, Signature(block.signature)] if block.signature else steps
            case "redacted_thinking":
                return [Redacted(block.data)]
            case "tool_use":
                self._input = bytes(block.input)
                return [CallStart(block.id, block.name)]
        return []

    def _delta(self, delta: _Delta) -> list[Step]:
        match delta.type:
            case "text_delta" if delta.text:
                return [Content(delta.text)]
            case "thinking_delta" if delta.thinking:
                return [Reasoning(delta.thinking)]
            case "signature_delta":
                return [Signature(delta.signature)]
            case "input_json_delta" if delta.partial_json:
                self._input = None
                return [CallArguments(delta.partial_json)]
        return []

    def _block_end(self) -> list[Step]:
        """A call without deltas has the input of its start event: an empty object, or the whole input."""
        given, self._input = self._input, None
        return [] if given is None else [CallArguments(given.decode())]

    def _ending(self, told: _Event) -> list[Step]:
        steps = self._count(told.usage)
        if told.delta is not None and told.delta.stop_reason is not None:
            steps += self._end(told.delta.stop_reason, told.delta.stop_sequence)
        return steps

    def _end(self, reason: str | None, sequence: str | None) -> list[Step]:
        return [End(_REASONS.get(reason or "", "stop"), sequence)]

    def _count(self, counts: Counts | None) -> list[Step]:
        if counts is None:
            return []
        self._counts = self._counts.updated(counts)
        return [Counted(self._counts.usage())]
