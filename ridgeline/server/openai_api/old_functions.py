"""Chat's older shape of tools: `functions`, `function_call` and messages with the role `function`.

Called by `chat`. The body is converted to one with tools before anything else reads it; only the answer's
shape and the field names in errors stay the older ones.
"""

from __future__ import annotations

import re

import msgspec

from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import (
    ChatRequest,
    FunctionName,
    Message,
    MessageToolCall,
    NamedToolChoice,
    ToolDefinition,
)

_TOOL = re.compile(r"\btools\[(\d+)\](?:\.function)?")
_CHOICE = re.compile(r"\btool_choice(?:\.function)?")


def with_tools(body: ChatRequest) -> ChatRequest:
    """The same request with `tools` and `tool_choice`."""
    messages = _messages(body.messages)
    if body.functions is None and body.function_call is None:
        return body if messages is body.messages else msgspec.structs.replace(body, messages=messages)
    if body.tools:
        raise BadRequest("functions", "cannot be combined with tools, which replaces it")
    if isinstance(body.function_call, str) and body.function_call not in ("none", "auto"):
        raise BadRequest("function_call", "must be none, auto or an object with a name")
    return msgspec.structs.replace(
        body,
        messages=messages,
        functions=None,
        function_call=None,
        tools=[ToolDefinition(type="function", function=function) for function in body.functions or ()],
        tool_choice=_choice(body.function_call),
        parallel_tool_calls=False,
    )


def in_older_names(error: BadRequest) -> BadRequest:
    """An error about the tools, under the client's field names."""
    reply = error.reply
    param = _renamed(reply.param or "")
    return BadRequest(param or None, _renamed(reply.message).removeprefix(f"{param}: "), reply.code)


def _renamed(text: str) -> str:
    return _CHOICE.sub("function_call", _TOOL.sub(r"functions[\1]", text))


def _choice(given: str | FunctionName | None) -> str | NamedToolChoice | None:
    if isinstance(given, FunctionName):
        return NamedToolChoice(type="function", function=given)
    return given


def _messages(messages: list[Message]) -> list[Message]:
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    ids: dict[str, str] = {}  # of the last call of each name
    return [_message(message, number, ids) for number, message in enumerate(messages)]


def _message(message: Message, number: int, ids: dict[str, str]) -> Message:
    called, path = message.function_call, f"messages[{number}]"
    if called is not None:
        if message.tool_calls:
            raise BadRequest(f"{path}.function_call", "cannot be combined with tool_calls")
        id = ids[called.name] = (
            f"call{number:05}"  # 9 letters and digits: Mistral's template accepts no others
        )
        call = MessageToolCall(id=id, type="function", function=called)
        return msgspec.structs.replace(message, function_call=None, tool_calls=[call])
    if message.role != "function":
        return message
    if message.name not in ids:
        raise BadRequest(f"{path}.name", "no function_call before this message has that name")
    return msgspec.structs.replace(message, role="tool", tool_call_id=ids[message.name])
