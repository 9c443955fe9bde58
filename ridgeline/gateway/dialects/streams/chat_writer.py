"""ChatWriter: writes steps as OpenAI's chat completion, or as its chunks."""

from __future__ import annotations

import time
from typing import Any

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
from ridgeline.gateway.dialects.usage_bodies import chat_usage
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

FINISH: dict[Reason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context": "length",
    "tool_calls": "tool_calls",
    "refusal": "content_filter",
}
_encoder = msgspec.json.Encoder()


class ChatWriter:
    """`include_usage`: the client asked for a last chunk with the counts."""

    def __init__(self, include_usage: bool = False) -> None:
        self._include_usage = include_usage
        self._head: dict[str, Any] = {}
        self._usage = Usage()
        self._calls = 0
        self._thought: list[str] = []
        self._thoughts = 0

    def write(self, steps: list[Step]) -> bytes:
        return b"".join([self._event(step) for step in steps])

    def whole(self, steps: list[Step]) -> bytes:
        content: list[str] = []
        reasoning: list[str] = []
        thoughts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        end = End("stop")
        for step in steps:
            match step:
                case Begin():
                    self._begin(step)
                case Content(text):
                    content.append(text)
                case CallStart(id, name):
                    calls.append({"id": id, "type": "function", "function": {"name": name}})
                    arguments.append([])
                case CallArguments(text):
                    arguments[-1].append(text)
                case Reasoning() | Signature() | Redacted():
                    if isinstance(step, Reasoning):
                        reasoning.append(step.text)
                    thoughts += self._thinking_blocks(step)
                case Counted(usage):
                    self._usage = usage
                case End():
                    end = step
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content) or None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if thoughts:
            message["thinking_blocks"] = thoughts
        for call, texts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, **_finish(end)}
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": chat_usage(self._usage),
        }
        return _encoder.encode(body)

    def _event(self, step: Step) -> bytes:
        match step:
            case Content(text):
                return self._delta({"content": text})
            case CallArguments(text):
                call: dict[str, Any] = {"index": self._calls - 1, "function": {"arguments": text}}
                return self._delta({"tool_calls": [call]})
            case Begin():
                self._begin(step)
                return self._delta({"role": "assistant", "content": None})
            case CallStart(id, name):
                self._calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self._calls - 1, "id": id, "type": "function", "function": function}
                return self._delta({"tool_calls": [call]})
            case Reasoning() | Signature() | Redacted():
                return self._think(step)
            case End():
                return self._chunk([{"index": 0, "delta": {}, "logprobs": None, **_finish(step)}])
            case Counted(usage):
                self._usage = usage
            case Failed(error):
                return translated_error_event("chat", error)
            case Ping():
                return b": ping\n\n"
            case Done():
                last = self._chunk([], chat_usage(self._usage)) if self._include_usage else b""
                return last + b"data: [DONE]\n\n"
        return b""

    def _begin(self, step: Begin) -> None:
        created = int(time.time()) if step.created is None else step.created
        self._head = {
            "id": f"chatcmpl-{step.id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": step.model,
        }

    def _think(self, step: Reasoning | Signature | Redacted) -> bytes:
        blocks = self._thinking_blocks(step)
        told = self._delta({"reasoning_content": step.text}) if isinstance(step, Reasoning) else b""
        return told + self._delta({"thinking_blocks": blocks}) if blocks else told

    def _thinking_blocks(self, step: Reasoning | Signature | Redacted) -> list[dict[str, Any]]:
        """Blocks that Anthropic expects back unchanged in the next request: a client that returns the message
        with this field keeps the model's thinking across calls. Indexed, as the SDK merges lists by index.
        """
        block: dict[str, Any]
        match step:
            case Reasoning(text):
                self._thought.append(text)
                return []
            case Signature(signature):
                block = {"type": "thinking", "thinking": "".join(self._thought), "signature": signature}
                self._thought = []
            case Redacted(data):
                block = {"type": "redacted_thinking", "data": data}
        self._thoughts += 1
        return [{"index": self._thoughts - 1, **block}]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return b"data: " + _encoder.encode(chunk) + b"\n\n"


def _finish(end: End) -> dict[str, Any]:
    """The stop string that matched is in `stop_reason`, as in answers of ridgeline's server and vLLM."""
    finish: dict[str, Any] = {"finish_reason": FINISH[end.reason]}
    if end.stop_sequence is not None:
        finish["stop_reason"] = end.stop_sequence
    return finish
