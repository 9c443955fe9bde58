"""Translates OpenAI's responses request into a chat request, for upstreams without /v1/responses; a second
step makes it Anthropic's. Called by `translate`. A request that needs a stored response is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.body import Fields, raw
from ridgeline.gateway.dialects.reading import is_null, read, refuse
from ridgeline.gateway.dialects.responses_request import (
    Item,
    Part,
    ResponsesAsked,
    Tool,
    ToolChoice,
)
from ridgeline.gateway.errors import BadRequest
from ridgeline.web.response_tools import NOT_OFFERED, flat_name

REDACTED = "redacted:"  # prefix of thinking that only its upstream can decrypt
_SAME = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "stream",
    "user",
    "safety_identifier",
)
_LOGPROBS = "message.output_text.logprobs"
_RENAMED = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)


def chat_from_responses(fields: Fields, with_thinking: bool) -> Fields:
    """`with_thinking`: the request is for Anthropic, which expects its own thinking back."""
    asked = read(without_hosted(fields), ResponsesAsked)
    _check_stateless(asked)
    body: dict[str, Any] = {
        "messages": _messages(asked, with_thinking),
        "max_completion_tokens": asked.max_output_tokens,
        "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
        "response_format": _format(asked),
        **_tools(asked),
        **{name: getattr(asked, name) for name in _SAME},
    }
    if asked.stream:
        body["stream_options"] = {"include_usage": True}
    return {name: raw(value) for name, value in body.items() if value is not None}


def as_responses_error(error: BadRequest) -> BadRequest:
    """Renames the field in a refusal of the translated chat request to the client's name. The item of the
    input is unknown: several items may have become one message.
    """
    param = error.param or ""
    for chat, ours in _RENAMED:
        if param == chat or param.startswith((f"{chat}.", f"{chat}[")):
            message = error.message.removeprefix(param).removeprefix(": ")
            return BadRequest(f"{ours}: {message}", code=error.code, param=ours)
    return error


def _check_stateless(asked: ResponsesAsked) -> None:
    given: dict[str, tuple[object, tuple[object, ...]]] = {
        "store": (asked.store, (False,)),
        "background": (asked.background, (False,)),
        "previous_response_id": (asked.previous_response_id, ()),
        "conversation": (asked.conversation, ()),
        "prompt": (asked.prompt, ()),
    }
    for name, (value, harmless) in given.items():
        if value is not None and value not in harmless:
            raise refuse(name, "responses of this model are not stored; send the whole conversation in input")
    others: dict[str, tuple[object, tuple[object, ...]]] = {
        "truncation": (asked.truncation, ("disabled", "auto")),  # the upstream refuses values that do not fit
        "top_logprobs": (asked.top_logprobs, (0,)),
        "context_management": (asked.context_management, ([],)),
        "moderation": (asked.moderation, ()),
    }
    for name, (value, harmless) in others.items():
        if value is not None and value not in harmless:
            raise refuse(name, "the requested model does not support this field")
    if _LOGPROBS in (asked.include or ()):
        raise refuse("include", "this model does not return log-probabilities")


# ---- input ----


def _messages(asked: ResponsesAsked, with_thinking: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for number, item in enumerate(asked.input):
        path = f"input[{number}]"
        match item.type:
            case "message":
                _add_message(messages, item, path)
            case "function_call":
                call = {"name": flat_name(item.namespace, _needed(item.name, path, "name"))}
                call["arguments"] = _needed(item.arguments, path, "arguments")
                id = _needed(item.call_id, path, "call_id")
                turn = _assistant_turn(messages)
                turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": call})
            case "function_call_output":
                id = _needed(item.call_id, path, "call_id")
                content = _content(item.output, f"{path}.output")
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
            case "reasoning":
                if with_thinking:
                    _add_thinking(messages, item)
            case _:
                raise refuse(f"{path}.type", "this model has no stored state or hosted tools")
    for turn in messages:
        if turn["role"] == "assistant":
            turn.setdefault("content", None)
    if not messages:
        raise BadRequest("input: at least one item is required", param="input")
    return messages


def _add_message(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    role = _needed(item.role, path, "role")
    content = _content(item.content, f"{path}.content")
    if role == "assistant":
        _assistant_turn(messages, lacking=("content", "tool_calls"))["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant_turn(messages: list[dict[str, Any]], lacking: tuple[str, ...] = ()) -> dict[str, Any]:
    """Consecutive items form one turn: thinking first, then text, then calls."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in lacking):
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_thinking(messages: list[dict[str, Any]], item: Item) -> None:
    """Anthropic accepts thinking only with its signature."""
    signature = item.encrypted_content
    if signature is None:
        return
    turn = _assistant_turn(messages, lacking=("content", "tool_calls"))
    if signature.startswith(REDACTED):
        block = {"type": "redacted_thinking", "data": signature.removeprefix(REDACTED)}
    else:
        parts = item.content if isinstance(item.content, list) else ()
        text = "".join(part.text or "" for part in parts)
        block = {"type": "thinking", "thinking": text, "signature": signature}
    turn.setdefault("thinking_blocks", []).append(block)


def _needed(value: str | None, path: str, name: str) -> str:
    if value is None:
        raise BadRequest(
            f"{path}.{name}: this field is required", code="missing_field", param=f"{path}.{name}"
        )
    return value


def _content(content: str | list[Part] | None, path: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{path}[{number}]") for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Part, path: str) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text":
            return {"type": "text", "text": _needed(part.text, path, "text")}
        case "refusal":
            return {"type": "text", "text": _needed(part.refusal, path, "refusal")}
        case "input_image" if part.image_url is not None:
            return {"type": "image_url", "image_url": {"url": part.image_url}}
        case "input_file" if part.file_data is not None:
            file = {"filename": part.filename or "document.pdf", "file_data": part.file_data}
            return {"type": "file", "file": file}
    raise refuse(f"{path}.type", "this model accepts only text, images and inline files")


# ---- the rest ----


class _Kind(msgspec.Struct):
    type: str = ""


_raws = msgspec.json.Decoder(list[msgspec.Raw])
_kinds = msgspec.json.Decoder(list[_Kind])


def without_hosted(fields: Fields) -> Fields:
    """The same fields; a tool of an unsupported type keeps only its type."""
    if "tools" not in fields:
        return fields
    try:
        tools, kinds = _raws.decode(fields["tools"]), _kinds.decode(fields["tools"])
    except (msgspec.DecodeError, RecursionError):
        return fields  # refused by name
    kept = [
        {"type": kind.type} if kind.type in NOT_OFFERED else tool
        for tool, kind in zip(tools, kinds, strict=True)
    ]
    return {**fields, "tools": raw(kept)}


def _tools(asked: ResponsesAsked) -> dict[str, Any]:
    functions = _functions(asked.tools or [], "tools")
    choice: Any = asked.tool_choice
    if isinstance(choice, ToolChoice):
        choice, functions = _chosen(choice, functions)
    if not functions:
        return {"tool_choice": None if choice in ("auto", "none") else choice}
    tools = [_tool(name, tool) for name, tool in functions]
    return {"tools": tools, "tool_choice": choice}


Functions = list[tuple[str, Tool]]  # by flat name


def _functions(tools: list[Tool], path: str, namespace: str | None = None) -> Functions:
    found: Functions = []
    for number, tool in enumerate(tools):
        where = f"{path}[{number}]"
        if tool.type in NOT_OFFERED and namespace is None:
            continue
        if tool.type == "namespace" and tool.name is not None and namespace is None:
            found += _functions(tool.tools or [], f"{where}.tools", tool.name)
        elif tool.type != "function" or tool.name is None:
            raise refuse(f"{where}.type", "this model accepts only function tools")
        else:
            found.append((flat_name(namespace, tool.name), tool))
    return found


def _chosen(choice: ToolChoice, functions: Functions) -> tuple[Any, Functions]:
    """Send the model only the tools that it may call. A name may omit its namespace."""
    match choice.type:
        case "function" if choice.name is not None:
            named = [flat for flat, tool in functions if choice.name in (flat, tool.name)]
            name = named[0] if named else choice.name
            return {"type": "function", "function": {"name": name}}, functions
        case "allowed_tools" if choice.tools:
            allowed = {tool.name for tool in choice.tools if tool.type == "function"}
            kept = [(flat, tool) for flat, tool in functions if flat in allowed or tool.name in allowed]
            return choice.mode or "auto", kept
    raise refuse("tool_choice.type", "must be a function or allowed_tools for this model")


def _tool(name: str, tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": tool.description, "strict": tool.strict}
    if not is_null(tool.parameters):
        function["parameters"] = tool.parameters
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _format(asked: ResponsesAsked) -> dict[str, Any] | None:
    wanted = None if asked.text is None else asked.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    shape: dict[str, Any] = {"name": wanted.name or "answer", "strict": wanted.strict}
    shape["description"] = wanted.description
    given = {name: value for name, value in shape.items() if value is not None}
    return {"type": "json_schema", "json_schema": {**given, "schema": wanted.schema}}
