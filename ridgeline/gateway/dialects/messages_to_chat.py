"""Translates Anthropic's messages request into OpenAI's chat request. Called by `translate`.

Nothing that the model would read or do is dropped: a field without an equivalent is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.body import Fields, raw
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.dialects.messages_request import (
    DocumentBlock,
    Format,
    ImageBlock,
    Message,
    MessagesAsked,
    RedactedBlock,
    ResultBlock,
    Source,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from ridgeline.gateway.dialects.reading import is_null, read, refuse
from ridgeline.gateway.errors import BadRequest

Part = dict[str, Any]

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # sent by Claude Code
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def chat_from_messages(fields: Fields, config: DialectConfig) -> Fields:
    asked = read(fields, MessagesAsked)
    _check_harmless(asked)
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": _conversation(asked, config),
        config.max_tokens_field: asked.max_tokens,
        "stop": asked.stop_sequences or None,
        "reasoning_effort": _effort(asked),
        "user": None if asked.metadata is None else asked.metadata.user_id,
        "response_format": _format(asked),
        **_tools(asked),
    }
    for name in ("temperature", "top_p", "top_k", "stream"):
        body[name] = getattr(asked, name)
    if asked.stream:  # the last events of a message report its usage
        body["stream_options"] = {"include_usage": True}
    return {name: raw(value) for name, value in body.items() if value is not None}


def _check_harmless(asked: MessagesAsked) -> None:
    given: dict[str, tuple[object, tuple[object, ...]]] = {
        "container": (asked.container, ()),
        "mcp_servers": (asked.mcp_servers, ([],)),
        "context_management": (asked.context_management, ({}, {"edits": []}, _KEEP_ALL)),
    }
    for name, (value, harmless) in given.items():
        if value is not None and value not in harmless:
            raise refuse(name, "the requested model does not support this field")


# ---- messages ----


def _conversation(asked: MessagesAsked, config: DialectConfig) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _joined(asked.system)
    if system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(asked.messages):
        path = f"messages[{number}]"
        match message.role:
            case "user" | "system":
                messages += _user(message, path)
            case "assistant":
                messages += _assistant(message, path, config)
            case _:
                raise BadRequest(f"{path}.role: must be user or assistant", param=f"{path}.role")
    if messages and messages[-1]["role"] == "assistant":
        raise refuse("messages", "this model cannot continue a final message of the role assistant")
    if not messages:
        raise BadRequest("messages: at least one message with content is required", param="messages")
    return messages


def _user(message: Message, path: str) -> list[dict[str, Any]]:
    """Results of calls become separate messages and come first. Their images follow as a user message: a tool
    message holds only text.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}] if message.content else []
    results: list[dict[str, Any]] = []
    parts: list[Part] = []
    for number, block in enumerate(message.content):
        where = f"{path}.content[{number}]"
        match block:
            case ToolResultBlock():
                said, shown = _result(block, where)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
                parts += shown
            case TextBlock() | ImageBlock() | DocumentBlock():
                parts += _parts(block, where)
            case ThinkingBlock() | RedactedBlock() | ToolUseBlock():
                raise BadRequest(
                    f"{where}.type: this block is allowed only in a message of the role assistant",
                    param=f"{where}.type",
                )
    content = _content(parts)
    return [*results, {"role": message.role, "content": content}] if content else results


def _assistant(message: Message, path: str, config: DialectConfig) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}] if message.content else []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        where = f"{path}.content[{number}]"
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case RedactedBlock():
                pass
            case ToolUseBlock():
                calls.append(_call(block, where))
            case ImageBlock() | DocumentBlock() | ToolResultBlock():
                raise BadRequest(
                    f"{where}.type: this block is allowed only in a message of the role user",
                    param=f"{where}.type",
                )
    said = "\n".join(texts)
    if not said and not calls:
        return []
    turn: dict[str, Any] = {"role": "assistant", "content": said or None}
    if thoughts and config.send_reasoning:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _call(block: ToolUseBlock, path: str) -> dict[str, Any]:
    text = bytes(block.input)
    try:
        _object.decode(text)
    except msgspec.DecodeError:
        raise BadRequest(f"{path}.input: must be an object", param=f"{path}.input") from None
    function = {"name": block.name, "arguments": text.decode()}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock, path: str) -> tuple[str, list[Part]]:
    """The text, and the other parts."""
    texts: list[str] = []
    shown: list[Part] = []
    given: list[ResultBlock] = []
    if isinstance(block.content, str):
        texts.append(block.content)
    else:
        given = block.content or []
    for number, part in enumerate(given):
        for made in _parts(part, f"{path}.content[{number}]"):
            if made["type"] == "text":
                texts.append(made["text"])
            else:
                shown.append(made)
    text = "\n".join(texts)
    return (f"Error: {text}" if block.is_error else text), shown


def _parts(block: ResultBlock, path: str) -> list[Part]:
    match block:
        case TextBlock(text=text):
            return [{"type": "text", "text": text}] if text else []
        case ImageBlock(source=source):
            return [{"type": "image_url", "image_url": {"url": _url(source, f"{path}.source")}}]
        case DocumentBlock():
            return _document(block, path)


def _document(block: DocumentBlock, path: str) -> list[Part]:
    source, where = block.source, f"{path}.source"
    before = [{"type": "text", "text": text} for text in (block.context,) if text]
    if block.citations not in (None, {"enabled": False}):
        raise refuse(f"{path}.citations", "the requested model does not support citations")
    if source.type == "text" and source.data is not None:
        title = [{"type": "text", "text": text} for text in (block.title,) if text]
        return [*title, *before, {"type": "text", "text": source.data}]
    if source.type == "base64":
        file = {"filename": block.title or "document.pdf", "file_data": _url(source, where)}
        return [*before, {"type": "file", "file": file}]
    raise refuse(f"{where}.type", "must be base64 or text for this model")


def _url(source: Source, path: str) -> str:
    if source.type == "url" and source.url is not None:
        return source.url
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        return f"data:{source.media_type};base64,{source.data}"
    raise refuse(f"{path}.type", "must be base64 or url for this model")


def _content(parts: list[Part]) -> str | list[Part]:
    """Text alone is sent as a string, joined as ridgeline's server does: some servers refuse parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _joined(system: str | list[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(block.text for block in system if block.text)


# ---- the rest ----


def _tools(asked: MessagesAsked) -> dict[str, Any]:
    if not asked.tools:
        return {}
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)]
    choice = asked.tool_choice
    if choice is None:
        return {"tools": tools}
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tools": tools, "tool_choice": _choice(choice), "parallel_tool_calls": parallel}


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom") or is_null(tool.input_schema):
        raise refuse(f"{path}.type", "this model does not support tools that Anthropic runs")
    if tool.allowed_callers not in (None, [], ["direct"]):
        raise refuse(f"{path}.allowed_callers", "only the model can call tools here")
    if tool.defer_loading:
        raise refuse(f"{path}.defer_loading", "this model always gets every tool")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _choice(choice: ToolChoice) -> Any:
    types = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type in types:
        return types[choice.type]
    if choice.type != "tool" or choice.name is None:
        raise BadRequest("tool_choice: must be auto, any, none, or tool with a name", param="tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _effort(asked: MessagesAsked) -> str | None:
    """A thinking budget in tokens becomes the nearest effort; adaptive is the models' default."""
    if asked.output_config is not None:
        if asked.output_config.task_budget is not None:
            raise refuse("output_config.task_budget", "the requested model does not support this field")
        if asked.output_config.effort is not None:
            return {"max": "xhigh"}.get(asked.output_config.effort, asked.output_config.effort)
    thinking = asked.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    budget = thinking.budget_tokens or 0
    return "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"


def _format(asked: MessagesAsked) -> dict[str, Any] | None:
    wanted: Format | None = asked.output_format
    if asked.output_config is not None and asked.output_config.format is not None:
        wanted = asked.output_config.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        raise refuse("output_config.format.type", "must be json_schema")
    shape = {"name": "answer", "schema": wanted.schema, "strict": True}
    return {"type": "json_schema", "json_schema": shape}
