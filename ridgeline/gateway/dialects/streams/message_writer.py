"""MessageWriter: writes steps as Anthropic's message, or as its events."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Literal

import msgspec

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.dialects.error_bodies import translated_error_event
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
)
from ridgeline.gateway.dialects.usage_bodies import message_usage
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from ridgeline.web.tool_input import ToolInput

STOP: dict[Reason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
    "refusal": "refusal",
}
_DELTA = {"text": "text_delta", "thinking": "thinking_delta"}
_encoder = msgspec.json.Encoder()

Event = dict[str, Any]
Shown = Literal["yes", "omitted", "no"]


class MessageWriter:
    """`thinking`: how much of it the client asked for: all, blocks without text, or nothing."""

    def __init__(self, thinking: Shown = "no") -> None:
        self._thinking = thinking
        self._usage = Usage()
        self._end = End("stop")
        self._head: dict[str, Any] = {}
        self._begun = 0  # blocks
        self._open = ""  # the type of the open block
        self._input = ToolInput()
        self._digest = hashlib.sha256()

    def write(self, steps: list[Step]) -> bytes:
        return b"".join([_event(event) for step in steps for event in self._events(step)])

    def whole(self, steps: list[Step]) -> bytes:
        """The blocks that the events add up to."""
        content: list[dict[str, Any]] = []
        for step in steps:
            for event in self._events(step):
                match event["type"]:
                    case "content_block_start":
                        content.append({**event["content_block"], "input_json": ""})
                    case "content_block_delta":
                        _grow(content[-1], event["delta"])
        for block in content:
            arguments = block.pop("input_json")
            if block["type"] == "tool_use":
                block["input"] = msgspec.Raw(arguments.encode())
        body = self._message(content, message_usage(self._usage))
        body |= _stop(self._end)
        return _encoder.encode(body)

    def _events(self, step: Step) -> list[Event]:
        match step:
            case Content(text):
                return [*self._ensure("text", {"type": "text", "text": ""}), self._grown("text", text)]
            case CallArguments(text):
                return self._grow_input(self._input.add(text))
            case CallStart(id, name):
                block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return [*self._close(cut=False), *self._start(block)]
            case Reasoning() | Signature() | Redacted():
                return [] if self._thinking == "no" else self._think(step)
            case Begin(id, model):
                self._head = {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}
                empty = {**self._message([], message_usage(self._usage)), "stop_reason": None}
                return [{"type": "message_start", "message": {**empty, "stop_sequence": None}}]
            case Counted(usage):
                self._usage = usage
            case End(reason):
                self._end = step
                return self._close(cut=reason not in ("stop", "tool_calls"))
            case Ping():
                return [{"type": "ping"}]
            case Failed(error):
                return [{"type": "error", "told": error}]
            case Done():
                last = {
                    "type": "message_delta",
                    "delta": _stop(self._end),
                    "usage": message_usage(self._usage),
                }
                return [last, {"type": "message_stop"}]
        return []

    def _think(self, step: Reasoning | Signature | Redacted) -> list[Event]:
        match step:
            case Reasoning(text):
                self._digest.update(text.encode())
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begun = self._ensure("thinking", block)
                return [*begun, self._grown("thinking", text)] if self._thinking == "yes" else begun
            case Redacted(data):
                block = {"type": "redacted_thinking", "data": data}
                return [*self._close(cut=False), *self._start(block), *self._close(cut=False)]
            case Signature(signature):
                return self._close(cut=False, signature=signature)

    def _ensure(self, kind: str, block: dict[str, Any]) -> list[Event]:
        return [] if self._open == kind else [*self._close(cut=False), *self._start(block)]

    def _start(self, block: dict[str, Any]) -> list[Event]:
        self._begun += 1
        self._open = block["type"]
        return [{"type": "content_block_start", "index": self._begun - 1, "content_block": block}]

    def _close(self, cut: bool, signature: str = "") -> list[Event]:
        """`cut`: the answer was truncated, so a call may be incomplete."""
        if not self._open:
            return []
        events: list[Event] = []
        if self._open == "tool_use":
            events += self._grow_input(self._input.end(cut))
            self._input = ToolInput()
        elif self._open == "thinking":
            delta = {"type": "signature_delta", "signature": signature or self._own_signature()}
            events.append(self._delta(delta))
        self._open = ""
        return [*events, {"type": "content_block_stop", "index": self._begun - 1}]

    def _own_signature(self) -> str:
        """Equal for equal thinking. It is never verified: clients need a value to send back."""
        digest, self._digest = self._digest, hashlib.sha256()
        return base64.b64encode(digest.digest()).decode()

    def _grow_input(self, text: str) -> list[Event]:
        return [self._delta({"type": "input_json_delta", "partial_json": text})] if text else []

    def _grown(self, name: str, text: str) -> Event:
        return self._delta({"type": _DELTA[name], name: text})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._begun - 1, "delta": delta}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "content": content, "usage": {**usage, "service_tier": "standard"}}


def _stop(end: End) -> dict[str, Any]:
    return {"stop_reason": STOP[end.reason], "stop_sequence": end.stop_sequence}


def _event(event: Event) -> bytes:
    name: str = event["type"]
    if name == "error":
        return translated_error_event("messages", event["told"])
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "input_json_delta":
            block["input_json"] += delta["partial_json"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
