"""Converts a response's request to a chat request, and chat's errors back to the client's field names.

`converted` makes the chat body from the conversation's items and the options; its `FieldNames` map a path of
that body (`messages[3].tool_calls[0].function.arguments`) to the client's (`input[4].arguments`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import UNSET

from ridgeline.engine.errors import InvalidRequest
from ridgeline.models.errors import TemplateError
from ridgeline.server.errors import ApiError, BadRequest, ErrorReply, reply_to
from ridgeline.server.http.decoding import decode
from ridgeline.server.openai_api.request_bodies import ChatRequest
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.responses_api.bodies import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
)
from ridgeline.server.responses_api.items import Placed, refused_type, unsealed
from ridgeline.server.responses_api.namespaces import Offered, called, offered
from ridgeline.server.responses_api.protocol import (
    LOGPROBS,
    InputTokensRequest,
    ResponseRequest,
    ResponseToolChoice,
)
from ridgeline.web.response_tools import NOT_OFFERED, flat_name
from ridgeline.web.sampling_fields import SAMPLING

T = TypeVar("T")

SAME_NAME = (
    *SAMPLING,
    "logit_bias",
    "stop",
    "ignore_eos",
    "thinking_token_budget",
    "priority",
    "cache_salt",
    "stream",
)
CHOICES = ("none", "auto", "required")
SUMMARY = "Summary of the conversation so far:\n"  # precedes the summary of a compaction item
# Prefixes of chat's paths, longest first, and their names here.
RENAMED = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function", "tool_choice"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("messages", "input"),
)
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?P<rest>.*)", re.DOTALL)
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(?P<rest>.*)", re.DOTALL)


@dataclass(slots=True)
class FieldNames:
    """The client's path of every part of the chat body."""

    messages: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)  # messages that are function outputs
    tools: list[str] = field(default_factory=list)

    def of(self, path: str) -> str:
        """The client's path for a chat body's path; a path that is the same in both is returned unchanged."""
        if match := _MESSAGE.fullmatch(path):
            return self._message(int(match[1]), match[2], match["rest"])
        if match := _TOOL.fullmatch(path):
            return self.tools[int(match[1])] + match["rest"]
        for chat, ours in RENAMED:
            if path == chat or path.startswith((f"{chat}.", f"{chat}[")):
                return ours + path.removeprefix(chat)
        return path

    def _message(self, number: int, call: str | None, rest: str) -> str:
        if call is not None:
            rest = {".id": ".call_id"}.get(rest, rest.removeprefix(".function"))
            return self.calls[number, int(call)] + rest
        where = self.messages[number]
        if not where.startswith("input["):
            return where  # the string, the instructions, an earlier response
        if number in self.outputs:
            return where + rest.replace(".tool_call_id", ".call_id").replace(".content", ".output")
        return where + rest

    def reply(self, reply: ErrorReply) -> ApiError:
        """The same error, about the client's field."""
        ours = None if reply.param is None else self.of(reply.param)
        message = reply.message
        if reply.param is not None and message.startswith(f"{reply.param}: "):
            message = f"{ours}: {message.removeprefix(f'{reply.param}: ')}"
        return ApiError(
            reply.status, message, type=reply.type, param=ours, code=reply.code, headers=reply.headers
        )

    def during(self, work: Callable[[], T]) -> T:
        """Run `work`; report its errors under the client's field names."""
        try:
            return work()
        except (ApiError, InvalidRequest, TemplateError) as error:
            reply = reply_to(error)
            assert reply is not None  # all three are in the table
            raise self.reply(reply) from None


def converted(body: InputTokensRequest, items: Sequence[Placed]) -> tuple[ChatRequest, FieldNames]:
    names = FieldNames()
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body.instructions, items, names),
        "chat_template_kwargs": body.chat_template_kwargs,
        "parallel_tool_calls": body.parallel_tool_calls,
        **_tools(body, names),
        **_text(body),
    }
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponseRequest):
        chat |= {name: getattr(body, name) for name in SAME_NAME}
        chat |= _logprobs(body)
        chat["max_completion_tokens"] = body.max_output_tokens
    given = {name: value for name, value in chat.items() if value is not None}
    # Through chat's decoding, so that the same values are refused.
    return names.during(lambda: decode(encode(given), ChatRequest)), names


def _messages(instructions: str | None, items: Sequence[Placed], names: FieldNames) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    if instructions is not None:
        _say(messages, names, "instructions", role="system", content=instructions)
    for placed in items:
        match placed.item:
            case MessageItem(role="assistant") as said:
                turn = _assistant_turn(messages, names, placed.path, lacking=("content", "tool_calls"))
                turn["content"] = _parts(said)
            case MessageItem() as said:
                _say(messages, names, placed.path, role=said.role, content=_parts(said))
            case ReasoningItem() as thought:
                text = "\n".join(part.text for part in thought.content)
                if text:
                    absent = ("content", "tool_calls", "reasoning_content")
                    turn = _assistant_turn(messages, names, placed.path, lacking=absent)
                    turn["reasoning_content"] = text
            case FunctionCallItem() as call:
                turn = _assistant_turn(messages, names, placed.path, lacking=())
                calls = turn.setdefault("tool_calls", [])
                names.calls[len(messages) - 1, len(calls)] = placed.path
                namespace = None if call.namespace is UNSET else call.namespace
                function = {"name": flat_name(namespace, call.name), "arguments": call.arguments}
                calls.append({"id": call.call_id, "type": "function", "function": function})
                called.add(call.call_id)
            case CompactionItem() as compaction:
                summary = unsealed(compaction.encrypted_content, f"{placed.path}.encrypted_content")
                _say(messages, names, placed.path, role="user", content=SUMMARY + summary)
            case FunctionCallOutputItem() as output:
                if output.call_id not in called:
                    message = f"no function_call before it has the id {output.call_id[:64]!r}"
                    raise BadRequest(f"{placed.path}.call_id", message)
                names.outputs.add(len(messages))
                content = output.output if isinstance(output.output, str) else _chat_parts(output.output)
                _say(messages, names, placed.path, role="tool", content=content, tool_call_id=output.call_id)
    for turn in messages:
        if turn["role"] == "assistant" and not turn.keys() & {"content", "tool_calls"}:
            turn["content"] = ""  # reasoning without text
    return messages


def _say(messages: list[dict[str, Any]], names: FieldNames, path: str, **message: Any) -> None:
    messages.append(message)
    names.messages.append(path)


def _assistant_turn(
    messages: list[dict[str, Any]], names: FieldNames, path: str, lacking: tuple[str, ...]
) -> dict[str, Any]:
    """Consecutive items form one assistant turn: reasoning, then text, then calls. An item out of that order
    begins a new turn.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in lacking):
        _say(messages, names, path, role="assistant")
        return messages[-1]
    if "content" not in last:
        names.messages[-1] = path  # the item that an error about the message most likely concerns
    return last


def _parts(said: MessageItem) -> str | list[dict[str, str]]:
    return said.content[0].text if len(said.content) == 1 else _chat_parts(said.content)


def _chat_parts(parts: Sequence[Any]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.text} for part in parts]


def _tools(body: InputTokensRequest, names: FieldNames) -> dict[str, Any]:
    functions = offered(body.tools)
    choice, allowed = _choice(body.tool_choice, functions)
    told = [function for function in functions if allowed is None or function.name in allowed]
    names.tools = [function.path for function in told]
    tools = [{"type": "function", "function": _function(function)} for function in told]
    return {"tools": tools or None, "tool_choice": choice}


def _function(offered: Offered) -> dict[str, Any]:
    function = {
        "name": offered.name,
        "description": offered.description,
        "parameters": offered.tool.parameters,
        "strict": offered.tool.strict,
    }
    return {name: value for name, value in function.items() if value is not None}


def _choice(
    choice: str | ResponseToolChoice | None, functions: Sequence[Offered]
) -> tuple[Any, set[str] | None]:
    """Chat's tool_choice, and the names of the tools shown to the model; None for all."""
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in CHOICES:
            raise BadRequest("tool_choice", f"unknown choice {choice[:64]!r}; known are {', '.join(CHOICES)}")
        return choice, None
    match choice.type:
        case "function":
            if choice.name is None:
                raise BadRequest("tool_choice.name", "this field is required", "missing_field")
            name = called(choice.name, functions, "tool_choice.name")
            return {"type": "function", "function": {"name": name}}, None
        case "file_search":
            return "auto", None  # it is searched in any case; the model then answers as it likes
        case "allowed_tools":
            return choice.mode or "auto", _allowed(choice, functions)
    raise refused_type(
        "tool_choice.type", choice.type, "choices", ("function", "allowed_tools", "file_search")
    )


def _allowed(choice: ResponseToolChoice, functions: Sequence[Offered]) -> set[str]:
    if choice.mode not in (None, "auto", "required"):
        raise BadRequest("tool_choice.mode", "must be auto or required")
    if not choice.tools:
        raise BadRequest("tool_choice.tools", "at least one tool is needed")
    allowed = set()
    for i, tool in enumerate(choice.tools):
        path = f"tool_choice.tools[{i}]"
        if tool.type in (*NOT_OFFERED, "file_search"):
            continue
        if tool.type != "function":
            raise refused_type(f"{path}.type", tool.type, "tools", ("function", "file_search", *NOT_OFFERED))
        allowed.add(called(tool.name or "", functions, f"{path}.name"))
    return allowed


def _text(body: InputTokensRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {}
    asked = body.text.format
    if asked.type != "json_schema":
        for name in ("name", "schema"):
            if getattr(asked, name) is not None:
                raise BadRequest(f"text.format.{name}", "only allowed with type: json_schema")
        return {"response_format": {"type": asked.type}}
    schema = {"name": asked.name, "schema": asked.schema, "strict": asked.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def _logprobs(body: ResponseRequest) -> dict[str, Any]:
    if LOGPROBS in (body.include or ()):
        return {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.top_logprobs:
        raise BadRequest("top_logprobs", f"only allowed together with include: [{LOGPROBS!r}]")
    return {}
