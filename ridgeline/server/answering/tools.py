"""The tools of a chat request, validated: which may be called, which must be, and the messages that carry
calls.

Called by `chat_job`. Independent of formats: `parsing` knows how a model writes a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.server.errors import BadRequest
from ridgeline.server.http.limits import MAX_CALLS, MAX_ID_CHARACTERS, MAX_TOOL_BYTES, MAX_TOOLS
from ridgeline.server.openai_api.request_bodies import ChatRequest, Message, NamedToolChoice, ToolDefinition
from ridgeline.server.parsing.events import Tool

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the model may use tools in this answer. `name`: the tool it must call, if one is named."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools shown to the model."""
        return () if self.choice == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools whose calls are recognized."""
        if self.choice == "named":
            return tuple(tool for tool in self.tools if tool.name == self.name)
        return self.shown


def tool_use(body: ChatRequest) -> ToolUse:
    """The request's tools and choice, or a 400 that names the invalid part."""
    tools = checked_tools(body.tools or [])
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools, "auto" if tools else "none", parallel=parallel)
    if isinstance(choice, NamedToolChoice):
        return ToolUse(tools, "named", _named(choice, tools), parallel)
    if choice not in ("none", "auto", "required"):
        known = "none, auto, required, or an object naming a function"
        raise BadRequest("tool_choice", f"unknown choice {choice[:64]!r}; known are {known}")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice", "a call is required, but there are no tools to call")
    if choice == "required":
        return ToolUse(tools, "required", parallel=parallel)
    return ToolUse(tools, "auto" if choice == "auto" and tools else "none", parallel=parallel)


def checked_tools(definitions: Sequence[ToolDefinition], field: str = "tools") -> tuple[Tool, ...]:
    if len(definitions) > MAX_TOOLS:
        raise BadRequest(field, f"at most {MAX_TOOLS} tools, got {len(definitions)}")
    tools: dict[str, Tool] = {}
    size = 0
    for i, definition in enumerate(definitions):
        tool = _checked(definition, f"{field}[{i}]")
        if tool.name in tools:
            raise BadRequest(f"{field}[{i}].function.name", f"{tool.name!r} is the name of two tools")
        size += _size(tool, f"{field}[{i}].function.parameters")
        if size > MAX_TOOL_BYTES:
            raise BadRequest(f"{field}[{i}]", f"all tools together have more than {MAX_TOOL_BYTES} bytes")
        tools[tool.name] = tool
    return tuple(tools.values())


def _checked(definition: ToolDefinition, path: str) -> Tool:
    if definition.type != "function":
        kind = definition.type[:64]
        raise BadRequest(f"{path}.type", f"{kind!r} tools are not supported; only function is")
    function = definition.function
    if function is None:
        raise BadRequest(f"{path}.function", "this field is required", "missing_field")
    if not _NAME.fullmatch(function.name):
        raise BadRequest(f"{path}.function.name", "a name has 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if function.parameters is not None and function.parameters.get("type", "object") != "object":
        raise BadRequest(f"{path}.function.parameters.type", "the parameters of a function must be an object")
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


def _size(tool: Tool, path: str) -> int:
    try:
        written = json.dumps(tool.parameters)
    except RecursionError:
        raise BadRequest(path, "nested too deeply") from None
    return len(written) + len(tool.description or "") + len(tool.name)


def _named(choice: NamedToolChoice, tools: Sequence[Tool]) -> str:
    if choice.type != "function" or choice.function is None:
        raise BadRequest("tool_choice.function", "name the function to call, as {type, function: {name}}")
    name = choice.function.name
    if name not in {tool.name for tool in tools}:
        raise BadRequest("tool_choice.function.name", f"{name[:64]!r} is not one of the tools")
    return name


def check_calls(message: Message, path: str) -> None:
    """A message's calls must fit its role."""
    if message.tool_calls and message.role != "assistant":
        raise BadRequest(f"{path}.tool_calls", "only an assistant's message makes calls")
    if len(message.tool_calls or ()) > MAX_CALLS:
        raise BadRequest(f"{path}.tool_calls", f"at most {MAX_CALLS} calls")
    for i, call in enumerate(message.tool_calls or ()):
        where = f"{path}.tool_calls[{i}]"
        if call.type not in (None, "function") or call.function is None:
            raise BadRequest(f"{where}.function", "only calls of functions are supported; give a function")
        if len(call.id) > MAX_ID_CHARACTERS:
            raise BadRequest(f"{where}.id", f"at most {MAX_ID_CHARACTERS} characters")
    if message.role == "tool" and message.tool_call_id is None:
        raise BadRequest(f"{path}.tool_call_id", "name the call that this is the result of", "missing_field")
    if message.tool_call_id is not None and len(message.tool_call_id) > MAX_ID_CHARACTERS:
        raise BadRequest(f"{path}.tool_call_id", f"at most {MAX_ID_CHARACTERS} characters")
