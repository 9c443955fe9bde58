"""Translates OpenAI's chat request into Anthropic's messages request. Called by `translate`.

Nothing that the model would read or do is dropped: a field without an equivalent is refused.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from ridgeline.gateway.body import Fields, raw
from ridgeline.gateway.dialects.chat_request import (
    AssistantMessage,
    AudioPart,
    ChatAsked,
    DeveloperMessage,
    File,
    FilePart,
    FunctionMessage,
    ImagePart,
    Message,
    Part,
    RefusalPart,
    SystemMessage,
    TextPart,
    ThinkingBlock,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.dialects.reading import is_null, read, refuse
from ridgeline.gateway.errors import BadRequest
from ridgeline.web.tool_input import ToolInput

Block = dict[str, Any]

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,", re.ASCII)
_TOOL_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 24576, "max": 31999}
_NO_PARAMETERS = msgspec.Raw(b'{"type":"object","properties":{}}')


def messages_from_chat(fields: Fields, config: DialectConfig) -> Fields:
    asked = read(fields, ChatAsked)
    _check_harmless(asked)
    system, messages = _conversation(asked.messages)
    if not messages:
        raise BadRequest("messages: at least one message with content is required", param="messages")
    body: dict[str, Any] = {"model": asked.model, "messages": messages, **_limits(asked, config)}
    if system:
        body["system"] = system
    if asked.stop:
        body["stop_sequences"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    for name in ("temperature", "top_p", "top_k", "stream", "cache_control"):
        body[name] = getattr(asked, name)
    if asked.temperature is not None and asked.temperature > 1:
        raise refuse("temperature", "must be at most 1 for this model")
    if user := asked.user or asked.safety_identifier:
        body["metadata"] = {"user_id": user}
    body |= _tools(asked)
    _add_format(asked, body)
    return {name: raw(value) for name, value in body.items() if value is not None}


def _check_harmless(asked: ChatAsked) -> None:
    """Refuse fields without an equivalent, unless their values have no effect."""
    given: dict[str, tuple[object, tuple[object, ...]]] = {
        "n": (asked.n, (1,)),
        "frequency_penalty": (asked.frequency_penalty, (0,)),
        "presence_penalty": (asked.presence_penalty, (0,)),
        "logit_bias": (asked.logit_bias, ({},)),
        "logprobs": (asked.logprobs, (False,)),
        "top_logprobs": (asked.top_logprobs, (0,)),
        "modalities": (asked.modalities, (["text"],)),
        "audio": (asked.audio, ()),
        "web_search_options": (asked.web_search_options, ()),
        "moderation": (asked.moderation, ()),
    }
    for name, (value, harmless) in given.items():
        if value is not None and value not in harmless:
            raise refuse(name, "the requested model does not support this field")
    if asked.functions:
        raise refuse("functions", "use tools")
    if asked.function_call not in (None, "none", "auto"):
        raise refuse("function_call", "use tool_choice")


# ---- messages ----


def _conversation(asked: list[Message]) -> tuple[list[Block], list[dict[str, Any]]]:
    """System messages move before the conversation. Consecutive messages of one role become one: the
    results of all calls must be in the message after them.
    """
    system: list[Block] = []
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(asked):
        path = f"messages[{number}]"
        if message.name is not None and not isinstance(message, ToolMessage):
            raise refuse(f"{path}.name", "the requested model does not support names of speakers")
        match message:
            case SystemMessage(content=content) | DeveloperMessage(content=content):
                blocks = _blocks(content, f"{path}.content")
                if any(block["type"] != "text" for block in blocks):
                    raise refuse(f"{path}.content", "system messages for this model must be text")
                system += _marked(blocks, message.cache_control)
                continue
            case UserMessage(content=content):
                role, blocks = "user", _blocks(content, f"{path}.content")
            case AssistantMessage():
                role, blocks = "assistant", _assistant(message, path)
            case ToolMessage():
                role, blocks = "user", [_result(message, path)]
            case FunctionMessage():
                raise refuse(f"{path}.role", "use tools, and messages of the role tool")
        blocks = _marked(blocks, message.cache_control)
        if not blocks:
            continue  # empty messages are not allowed
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _marked(blocks: list[Block], cache_control: Any) -> list[Block]:
    if cache_control is not None and blocks:
        blocks[-1]["cache_control"] = cache_control
    return blocks


def _blocks(content: str | list[Part] | None, path: str) -> list[Block]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    blocks: list[Block] = []
    block: Block
    for number, part in enumerate(content):
        where = f"{path}[{number}]"
        match part:
            case TextPart(text=text):
                block = {"type": "text", "text": text} if text else {}
            case ImagePart(image_url=image):
                block = {"type": "image", "source": _image(image.url, f"{where}.image_url.url")}
            case FilePart(file=file):
                block = _document(file, f"{where}.file")
            case RefusalPart(refusal=text):
                blocks.append({"type": "text", "text": text})
                continue
            case AudioPart():
                raise refuse(f"{where}.type", "the requested model does not accept audio")
        if block:
            blocks += _marked([block], part.cache_control)
    return blocks


def _image(url: str, path: str) -> dict[str, Any]:
    if data := _DATA_URL.match(url):
        return {"type": "base64", "media_type": data[1], "data": url[data.end() :]}
    if url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    raise BadRequest(f"{path}: must be an http address or a base64 data URL", param=path)


def _document(file: File, path: str) -> Block:
    if file.file_data is None:
        raise refuse(f"{path}.file_id", "stored files are not available to this model; send file_data")
    data = _DATA_URL.match(file.file_data)
    if data is None or data[1] != "application/pdf":
        raise refuse(f"{path}.file_data", "must be a base64 data URL of a PDF for this model")
    source = {"type": "base64", "media_type": data[1], "data": file.file_data[data.end() :]}
    title = {} if file.filename is None else {"title": file.filename}
    return {"type": "document", "source": source, **title}


def _assistant(message: AssistantMessage, path: str) -> list[Block]:
    if message.audio is not None:
        raise refuse(f"{path}.audio", "the requested model does not accept audio")
    if message.function_call is not None:
        raise refuse(f"{path}.function_call", "use tool_calls")
    blocks = [_thinking(block) for block in message.thinking_blocks or ()]
    blocks += _blocks(message.content, f"{path}.content")
    blocks += _blocks(message.refusal, f"{path}.refusal")
    for number, call in enumerate(message.tool_calls or ()):
        blocks.append(_call(call, f"{path}.tool_calls[{number}]"))
    return blocks


def _thinking(block: ThinkingBlock) -> Block:
    given = {"type": block.type, "thinking": block.thinking, "signature": block.signature, "data": block.data}
    return {name: value for name, value in given.items() if value is not None}


def _call(call: ToolCall, path: str) -> Block:
    if call.function is None:
        raise refuse(f"{path}.type", "must be function for this model")
    arguments = ToolInput()
    text = arguments.add(call.function.arguments)
    given = msgspec.Raw((text + arguments.end(cut=False)).encode())
    block = {"type": "tool_use", "id": _tool_id(call.id), "name": call.function.name, "input": given}
    return _marked([block], call.cache_control)[0]


def _result(message: ToolMessage, path: str) -> Block:
    block: Block = {"type": "tool_result", "tool_use_id": _tool_id(message.tool_call_id)}
    content = message.content
    if isinstance(content, str):
        return {**block, "content": content}
    return {**block, "content": _blocks(content, f"{path}.content")}


def _tool_id(id: str) -> str:
    """Ids made by other servers may hold characters that Anthropic refuses. Equal ids stay equal."""
    if _TOOL_ID.fullmatch(id):
        return id
    return "call_" + hashlib.sha256(id.encode()).hexdigest()[:32]


# ---- the rest ----


def _limits(asked: ChatAsked, config: DialectConfig) -> dict[str, Any]:
    named = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    limit = config.default_max_tokens if named is None else named
    if asked.thinking is not None:
        return {"max_tokens": limit, "thinking": asked.thinking}
    effort = asked.reasoning_effort
    if effort is None:
        return {"max_tokens": limit}
    if effort == "none":
        return {"max_tokens": limit, "thinking": {"type": "disabled"}}
    if effort not in _EFFORTS:
        known = ", ".join(("none", *_EFFORTS))
        raise BadRequest(f"reasoning_effort: must be one of {known}", param="reasoning_effort")
    if config.thinking == "adaptive":
        thinking: dict[str, Any] = {"type": "adaptive"}
        return {"max_tokens": limit, "thinking": thinking, "output_config": {"effort": _EFFORTS[effort]}}
    budget = _BUDGETS[effort]
    if named is None:
        limit += budget
    elif budget >= limit:
        budget = limit - 1  # below 1024 the upstream reports the error
    return {"max_tokens": limit, "thinking": {"type": "enabled", "budget_tokens": budget}}


def _tools(asked: ChatAsked) -> dict[str, Any]:
    if not asked.tools:
        if asked.tool_choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice: requires tools", param="tool_choice")
        return {}
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)]
    choice = None if asked.tool_choice is None else _choice(asked.tool_choice)
    if asked.parallel_tool_calls is False and (choice is None or choice["type"] != "none"):
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    return {"tools": tools, "tool_choice": choice}


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function" or function is None:
        raise refuse(f"{path}.type", "this model accepts only function tools")
    schema = function.parameters
    shaped = {
        "name": function.name,
        "description": function.description,
        "input_schema": _NO_PARAMETERS if is_null(schema) else schema,
        "strict": function.strict,
        "cache_control": tool.cache_control if tool.cache_control is not None else function.cache_control,
    }
    return {name: value for name, value in shaped.items() if value is not None}


def _choice(choice: str | ToolChoice) -> dict[str, Any]:
    if isinstance(choice, str):
        types = {"none": "none", "auto": "auto", "required": "any"}
        if choice not in types:
            raise BadRequest("tool_choice: must be none, auto, required or a function", param="tool_choice")
        return {"type": types[choice]}
    if choice.type != "function" or choice.function is None:
        raise refuse("tool_choice.type", "only a function can be chosen for this model")
    return {"type": "tool", "name": choice.function.name}


def _add_format(asked: ChatAsked, body: dict[str, Any]) -> None:
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        return
    schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    if wanted.type not in ("json_schema", "json_object") or (wanted.json_schema is None and is_null(schema)):
        raise refuse("response_format.type", "this model follows a json_schema, or none")
    if is_null(schema):
        raise BadRequest(
            "response_format.json_schema.schema: this field is required",
            param="response_format.json_schema.schema",
        )
    shape = {"type": "json_schema", "schema": schema}
    body["output_config"] = {**(body.get("output_config") or {}), "format": shape}
