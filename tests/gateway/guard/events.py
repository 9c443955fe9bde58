"""Streamed answers of the four dialects, made from pieces of their texts; and read back to whole texts."""

from __future__ import annotations

import json
from typing import Any


def sse(events: list[dict[str, Any]], named: bool = False, done: bool = False) -> bytes:
    out = b""
    for event in events:
        head = f"event: {event['type']}\n".encode() if named else b""
        out += head + b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
    return out + (b"data: [DONE]\n\n" if done else b"")


def read(data: bytes) -> list[Any]:
    events: list[Any] = []
    for block in data.split(b"\n\n"):
        data = [line[6:] for line in block.splitlines() if line.startswith(b"data: ")]
        events += ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in data]
    return events


def chat(texts: list[str], arguments: list[str], finished: bool = True) -> bytes:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "send", "arguments": ""}}
    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": text}) for text in texts]
    events += [chunk({"tool_calls": [call]})]
    events += [chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}) for part in arguments]
    events += [chunk({}, "tool_calls")] if finished else []
    events += [
        {**head, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    ]
    return sse(events, done=True)


def chat_texts(data: bytes) -> tuple[str, str]:
    text = arguments = ""
    for event in read(data):
        for choice in event["choices"] if isinstance(event, dict) else ():
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                arguments += call["function"].get("arguments") or ""
    return text, arguments


def completions(texts: list[str]) -> bytes:
    events = [{"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    return sse(
        [*events, {"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}], done=True
    )


def completions_text(data: bytes) -> str:
    return "".join(event["choices"][0]["text"] for event in read(data) if isinstance(event, dict))


def messages(texts: list[str], arguments: list[str], thinking: list[str]) -> bytes:
    def block(
        index: int, begin: dict[str, Any], name: str, kind: str, parts: list[str]
    ) -> list[dict[str, Any]]:
        deltas = [
            {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: part}}
            for part in parts
        ]
        start = {"type": "content_block_start", "index": index, "content_block": begin}
        return [start, *deltas, {"type": "content_block_stop", "index": index}]

    tool = {"type": "tool_use", "id": "toolu_1", "name": "send", "input": {}}
    events = [{"type": "message_start", "message": {"id": "m1", "role": "assistant", "content": []}}]
    events += block(0, {"type": "thinking", "thinking": ""}, "thinking", "thinking_delta", thinking)
    events += block(1, {"type": "text", "text": ""}, "text", "text_delta", texts)
    events += block(2, tool, "partial_json", "input_json_delta", arguments)
    events += [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}}]
    return sse([*events, {"type": "message_stop"}], named=True)


def messages_texts(data: bytes) -> tuple[str, str, str]:
    found = {"text": "", "partial_json": "", "thinking": ""}
    for event in read(data):
        if event["type"] == "content_block_delta":
            for name in found:
                found[name] += event["delta"].get(name, "")
    return found["text"], found["partial_json"], found["thinking"]


def responses(texts: list[str], arguments: list[str]) -> bytes:
    text, whole = "".join(texts), "".join(arguments)
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    call = {"item_id": "fc_1", "output_index": 1}
    message = {"id": "msg_1", "type": "message", "content": [{"type": "output_text", "text": text}]}
    function = {
        "id": "fc_1",
        "type": "function_call",
        "name": "send",
        "arguments": whole,
        "call_id": "call_1",
    }
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {"id": "resp_1", "output": []}}]
    events += [{"type": "response.output_text.delta", **place, "delta": part} for part in texts]
    events += [{"type": "response.output_text.done", **place, "text": text}]
    events += [
        {"type": "response.function_call_arguments.delta", **call, "delta": part} for part in arguments
    ]
    events += [{"type": "response.function_call_arguments.done", **call, "arguments": whole}]
    events += [{"type": "response.completed", "response": {"id": "resp_1", "output": [message, function]}}]
    return sse([{**event, "sequence_number": number} for number, event in enumerate(events)], named=True)


def responses_texts(data: bytes) -> tuple[str, str]:
    events = read(data)

    def joined(kind: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")

    return joined("output_text"), joined("function_call_arguments")
