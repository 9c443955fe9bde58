"""Converts messages and tools in OpenAI's shape to what a chat template reads.

Templates differ in details that each break a conversation with calls: arguments as an object or as text, one
call per message, ids of nine characters, no tools at all. A `Preparation` describes one template's needs; the
formats choose it from the template's source. Messages are plain data and never changed in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.server.parsing.events import Tool

Message = dict[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Preparation:
    """The input that a template needs."""

    arguments: Literal["object", "text"] = "object"
    one_call_per_message: bool = False
    short_ids: bool = False
    # Replaces the missing content of a message with calls.
    no_content: str | None = ""
    # The template shows the tools it is given; otherwise `lesson` and the tools go into the system message.
    shows_tools: bool = True
    lesson: str = ""
    # The template supports messages with calls and their results; otherwise they become plain text.
    shows_calls: bool = True
    has_system_role: bool = True
    fills_descriptions: bool = False
    # The template cannot show a type that allows null: null is removed.
    without_null: bool = False
    # The template reads results from the calling message, under `tool_responses`.
    results_in_calls: bool = False
    # The template refuses content beside reasoning in a message with calls: content is appended to reasoning.
    content_or_reasoning: bool = False

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The messages and the tools to render; no tools if the template does not show them itself."""
        prepared = [dict(message) for message in messages]
        if self.one_call_per_message:
            prepared = _one_call_each(prepared)
        if self.results_in_calls:
            prepared = _results_in_calls(prepared)
        if self.shows_calls:
            prepared = [self._with_calls(message) for message in prepared]
        else:
            prepared = _written_out(prepared)
        if tools and not self.shows_tools:
            prepared = _taught(prepared, self.lesson, tools, self.has_system_role)
        shown = [self._declared(tool) for tool in tools] if tools and self.shows_tools else None
        return prepared, shown

    def _with_calls(self, message: Message) -> Message:
        if message.get("role") == "tool" and self.short_ids and isinstance(message.get("tool_call_id"), str):
            return message | {"tool_call_id": short_id(message["tool_call_id"])}
        if not message.get("tool_calls"):
            # Templates test for the key, so an empty list must be absent.
            return {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [self._call(call) for call in message["tool_calls"]]
        if self.content_or_reasoning and message.get("content"):
            message = _as_reasoning(message)
        return message | {"content": message.get("content") or self.no_content, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments == "object":
            function["arguments"] = as_object(function.get("arguments"))
        prepared = {"type": "function", **call, "function": function}
        if self.short_ids and isinstance(call.get("id"), str):
            prepared["id"] = short_id(call["id"])
        return prepared

    def _declared(self, tool: Tool) -> dict[str, Any]:
        declared = declaration(tool)
        if self.fills_descriptions:
            declared["function"] = _described(declared["function"])
        if self.without_null:
            declared["function"]["parameters"] = _without_null(declared["function"]["parameters"])
        return declared


DEFAULT_PREPARATION = Preparation()


def declaration(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's API declares it, with the fields that were given."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def as_object(arguments: Any) -> Any:
    """Arguments as templates expect them; text that is not a JSON object stays text."""
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
            if "\\u" in arguments:  # may be a lone surrogate, which no tokenizer accepts
                json.dumps(decoded, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return arguments
        return decoded if isinstance(decoded, dict) else arguments
    return arguments


def short_id(call_id: str) -> str:
    """Maps an id to nine letters and digits, always the same, so that results still match their calls."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _as_reasoning(message: Message) -> Message:
    """The content of a message appended to its reasoning, if it has any."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name)), None)
    if reasoning is None:
        return message
    kept = {key: value for key, value in message.items() if key not in names}
    return {**kept, "content": None, names[0]: f"{reasoning}\n{_as_text(message['content'])}"}


def _described(function: dict[str, Any]) -> dict[str, Any]:
    """Adds a description to the function and each parameter, for templates that concatenate them."""
    described = {"description": "", **function}
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        filled = {
            name: {"description": "", **field} if isinstance(field, Mapping) else field
            for name, field in properties.items()
        }
        described["parameters"] = {**parameters, "properties": filled}
    return described


def _without_null(schema: Any) -> Any:
    """A schema without null in its lists of types."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    shown = {key: _without_null(value) for key, value in schema.items()}
    if isinstance(shown.get("type"), list):
        types = [name for name in shown["type"] if name != "null"]
        shown["type"] = types[0] if len(types) == 1 else types
    return shown


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Splits every message with several calls into several messages, each followed by its result."""
    prepared: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            prepared.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index].get("role") == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            shared = message if number == 0 else {"role": message["role"], "content": None}
            prepared.append({**shared, "tool_calls": [call]})
            prepared.extend(r for r in results if r.get("tool_call_id") == call.get("id"))
        known = {call.get("id") for call in calls}
        prepared.extend(r for r in results if r.get("tool_call_id") not in known)
    return prepared


def _results_in_calls(messages: list[Message]) -> list[Message]:
    """Every result in the message whose call it answers."""
    prepared: list[Message] = []
    for message in messages:
        caller = prepared[-1] if prepared else {}
        calls = caller.get("tool_calls") or ()
        if message.get("role") != "tool" or not calls:
            prepared.append(message)
            continue
        names = {call.get("id"): call["function"]["name"] for call in calls}
        result = {
            "name": names.get(message.get("tool_call_id"), message.get("name") or "unknown"),
            "response": _as_text(message.get("content")),
        }
        prepared[-1] = {**caller, "tool_responses": [*caller.get("tool_responses", ()), result]}
    return prepared


def _written_out(messages: list[Message]) -> list[Message]:
    """Calls as the JSON the model is taught to write, results as user messages; adjacent ones are joined."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    prepared: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        written = bool(calls) or message.get("role") == "tool"
        if calls:
            plain["content"] = "\n".join(filter(None, (_as_text(message.get("content")), _call_list(calls))))
        elif message.get("role") == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name") or "the function")
            plain = {"role": "user", "content": f"Result of {name}:\n{_as_text(message.get('content'))}"}
        before = prepared[-1] if prepared else None
        if before is not None and before["role"] == plain["role"] and (written or before.get("_written")):
            text = "\n\n".join((_as_text(before.get("content")), _as_text(plain.get("content"))))
            prepared[-1] = {**before, "content": text, "_written": True}
        else:
            prepared.append({**plain, "_written": written})
    return [{key: value for key, value in message.items() if key != "_written"} for message in prepared]


def _call_list(calls: Sequence[Mapping[str, Any]]) -> str:
    written = [
        {"name": call["function"]["name"], "arguments": as_object(call["function"].get("arguments"))}
        for call in calls
    ]
    return json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)


def _as_text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and "text" in part)


def _taught(
    messages: list[Message], lesson: str, tools: Sequence[Tool], has_system_role: bool
) -> list[Message]:
    """The tools and how to call them in the system message, or the user's if there is no such role."""
    declarations = "\n".join(json.dumps(declaration(tool)["function"], ensure_ascii=False) for tool in tools)
    text = lesson.replace("{tools}", declarations)
    role = "system" if has_system_role else "user"
    first = messages[0] if messages else None
    if first is not None and first.get("role") == role:
        own = _as_text(first.get("content"))
        joined = "\n\n".join((own, text) if has_system_role else (text, own))
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]
