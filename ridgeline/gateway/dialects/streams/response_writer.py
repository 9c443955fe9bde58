"""ResponseWriter: writes steps as OpenAI's response, or as its events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields
from ridgeline.gateway.dialects.error_bodies import Told
from ridgeline.gateway.dialects.responses_to_chat import REDACTED
from ridgeline.gateway.dialects.streams.steps import (
    Begin,
    Counted,
    Done,
    End,
    Failed,
    Ping,
    Redacted,
    Signature,
    Step,
)
from ridgeline.gateway.dialects.usage_bodies import response_usage
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning
from ridgeline.web.response_tools import flat_name

Event = dict[str, Any]

# Fields that a response repeats from its request, and their defaults.
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "user": None,
}
_INCOMPLETE = {"length": "max_output_tokens", "context": "max_output_tokens", "refusal": "content_filter"}
_encoder = msgspec.json.Encoder()


class ResponseWriter:
    """`fields`: the request, which a response repeats in part."""

    def __init__(self, fields: Fields) -> None:
        self._echoed = {
            name: default if bytes(fields.get(name, b"null")) == b"null" else fields[name]
            for name, default in _ECHOED.items()
        }
        self._homes = _homes(fields)
        self._body: dict[str, Any] = {}
        self._id = ""
        self._output: list[dict[str, Any]] = []  # complete items
        self._item: dict[str, Any] | None = None  # the open item
        self._texts: list[str] = []  # of it
        self._told = 0
        self._end = End("stop")
        self._usage = Usage()

    def write(self, steps: list[Step]) -> bytes:
        return b"".join([self._event(event) for step in steps for event in self._events(step)])

    def whole(self, steps: list[Step]) -> bytes:
        for step in steps:
            self._events(step)
        return _encoder.encode(self._body)

    def _event(self, event: Event) -> bytes:
        if event["type"] == "ping":
            return b": ping\n\n"
        named = {"type": event["type"], "sequence_number": self._told, **event}
        self._told += 1
        name: str = event["type"]
        return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(named) + b"\n\n"

    def _events(self, step: Step) -> list[Event]:
        match step:
            case Content(text):
                return self._grow("message", text)
            case Reasoning(text):
                return self._grow("reasoning", text)
            case CallArguments(text):
                return self._grow("function_call", text)
            case CallStart(id, name):
                called = {"call_id": id, **self._homes.get(name, {"name": name})}
                return [*self._finish("completed"), *self._begin_item("function_call", **called)]
            case Signature(signature):
                return self._sealed(signature)
            case Redacted(data):
                return [*self._finish("completed"), *self._sealed(REDACTED + data)]
            case Begin():
                return self._begin(step)
            case End():
                self._end = step
            case Counted(usage):
                self._usage = usage
            case Failed(error):
                return self._fail(error)
            case Ping():
                return [{"type": "ping"}]
            case Done():
                return self._done()
        return []

    # ---- the response ----

    def _begin(self, step: Begin) -> list[Event]:
        self._id = step.id
        self._body = {
            "id": f"resp_{step.id}",
            "object": "response",
            "created_at": int(time.time()) if step.created is None else step.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": step.model,
            "output": [],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "usage": None,
            **self._echoed,
        }
        began = dict(self._body)
        return [
            {"type": "response.created", "response": began},
            {"type": "response.in_progress", "response": began},
        ]

    def _done(self) -> list[Event]:
        reason = _INCOMPLETE.get(self._end.reason)
        events: list[Event] = []
        if not self._output and self._item is None:
            events += self._begin_item("message")  # an answer without text still has an empty message
        is_cut_call = self._item is not None and self._item["type"] == "function_call"
        is_cut_call &= self._end.reason != "tool_calls"
        events += self._finish("incomplete" if reason or is_cut_call else "completed")
        status = "incomplete" if reason else "completed"
        self._body |= {"status": status, "output": self._output, "usage": response_usage(self._usage)}
        if reason:
            self._body["incomplete_details"] = {"reason": reason}
        return [*events, {"type": f"response.{status}", "response": self._body}]

    def _fail(self, error: Told) -> list[Event]:
        events = self._finish("incomplete")
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        self._body |= {
            "status": "failed",
            "output": self._output,
            "error": {"code": code, "message": error.message},
        }
        return [*events, {"type": "response.failed", "response": self._body}]

    # ---- its items ----

    def _grow(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._item is None or self._item["type"] != kind:
            events = [*self._finish("completed"), *self._begin_item(kind)]
        self._texts.append(text)
        name = {
            "message": "response.output_text.delta",
            "reasoning": "response.reasoning_text.delta",
            "function_call": "response.function_call_arguments.delta",
        }[kind]
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, {"type": name, **self._place(), "delta": text, **more}]

    def _begin_item(self, kind: str, **fields: Any) -> list[Event]:
        number = len(self._output)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        head = {"id": f"{prefix}_{self._id}_{number}", "type": kind, "status": "in_progress"}
        own: dict[str, dict[str, Any]] = {
            "message": {"role": "assistant", "content": []},
            "reasoning": {"summary": [], "content": []},
            "function_call": {**fields, "arguments": ""},
        }
        self._item = {**head, **own[kind]}
        self._texts = []
        events: list[Event] = [
            {"type": "response.output_item.added", "output_index": number, "item": dict(self._item)}
        ]
        if kind != "function_call":
            events.append(
                {"type": "response.content_part.added", **self._place(), "part": _part(self._item, "")}
            )
        return events

    def _sealed(self, seal: str) -> list[Event]:
        """Ends thinking, with the signature that its upstream expects back."""
        events: list[Event] = []
        if self._item is None or self._item["type"] != "reasoning":
            events = [*self._finish("completed"), *self._begin_item("reasoning")]
        assert self._item is not None
        self._item["encrypted_content"] = seal
        return [*events, *self._finish("completed")]

    def _finish(self, status: str) -> list[Event]:
        item, self._item = self._item, None
        if item is None:
            return []
        text = "".join(self._texts)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append({"type": "response.function_call_arguments.done", **place, **done})
        else:
            is_text = item["type"] == "message"
            part = _part(item, text)
            place["content_index"] = 0
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            more: dict[str, Any] = {"logprobs": []} if is_text else {}
            events += [
                {"type": name, **place, "text": text, **more},
                {"type": "response.content_part.done", **place, "part": part},
            ]
            item["content"] = [part]
        item["status"] = status
        number = len(self._output)
        self._output.append(item)
        return [*events, {"type": "response.output_item.done", "output_index": number, "item": item}]

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self._output)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


class _Named(msgspec.Struct):
    type: str = ""
    name: str = ""
    tools: list[_Named] = []


_tools = msgspec.json.Decoder(list[_Named])


def _homes(fields: Fields) -> dict[str, dict[str, str]]:
    """By its flat name: the namespace and name of each function that the client has in a namespace."""
    if b"namespace" not in bytes(fields.get("tools", b"")):
        return {}
    return {
        flat_name(tool.name, inner.name): {"namespace": tool.name, "name": inner.name}
        for tool in _tools.decode(fields["tools"])
        if tool.type == "namespace"
        for inner in tool.tools
    }
