"""Converts Anthropic's bodies to chat requests: one path to the engine for all. Called by `handlers`.

Blocks become OpenAI chat messages; errors in those are reported under the client's field names
(`client_path`). Only fields that `request` documents as ignored are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ridgeline.server.errors import BadRequest
from ridgeline.server.messages_api.blocks import TOOL_ID, ThinkingShown
from ridgeline.server.messages_api.request import (
    CountTokensRequest,
    GivenBlock,
    GivenMessage,
    GivenRedactedThinking,
    GivenText,
    GivenThinking,
    GivenTool,
    GivenToolResult,
    GivenToolUse,
    MessagesRequest,
    OutputFormat,
    ResultText,
    ToolChoice,
)
from ridgeline.server.openai_api.request_bodies import (
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    NamedToolChoice,
    ResponseFormat,
    ToolDefinition,
)

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_TOOL = re.compile(r"(tools\[\d+\])\.function\b(.*)", re.DOTALL)
_NAMES = (
    ("response_format.json_schema.schema", "{format}.schema"),
    ("response_format.json_schema", "{format}"),
    ("response_format", "{format}"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("tool_choice.function", "tool_choice.name"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
)


@dataclass(slots=True)
class Turn:
    """One message for the template, under construction; `path` is where it starts in the client's body."""

    role: Literal["system", "user", "assistant", "tool"]
    path: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    answers: str | None = None

    def message(self) -> Message:
        silent = self.calls and not self.texts
        return Message(
            role=self.role,
            content=None if silent else "\n".join(self.texts),
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.answers,
        )


@dataclass(frozen=True, slots=True)
class Conversion:
    """A chat request, with the paths of its parts in the client's body."""

    chat: ChatRequest
    thinking: ThinkingShown
    paths: list[str]  # of the messages
    format_path: str

    def client_path(self, param: str) -> str:
        """The client's path for a chat request's `param`."""
        if message := _MESSAGE.fullmatch(param):
            path, rest = self.paths[int(message[1])], message[2]
            if rest.startswith(".tool_calls"):  # a call is a block like any other
                rest = ".content"
            return path if path == "system" else path + rest.replace(".tool_call_id", ".tool_use_id")
        if tool := _TOOL.fullmatch(param):
            return tool[1] + tool[2].replace(".parameters", ".input_schema", 1)
        for ours, theirs in _NAMES:
            if param == ours or param.startswith((ours + ".", ours + "[")):
                return theirs.format(format=self.format_path) + param[len(ours) :]
        return param

    def in_client_names(self, error: BadRequest) -> BadRequest:
        """The same error, under the client's path."""
        reply = error.reply
        if reply.param is None:
            return error
        return BadRequest(
            self.client_path(reply.param), reply.message.removeprefix(f"{reply.param}: "), reply.code
        )


def converted(body: CountTokensRequest, model_thinks: bool) -> Conversion:
    """`model_thinks`: its reasoning is marked, so it can be requested, limited and shown."""
    turns = _turns(body)
    continues = turns[-1].role == "assistant"
    if continues and turns[-1].calls:
        raise BadRequest(
            turns[-1].path, "the tool calls of the last message have no results; send the results after it"
        )
    if continues and not any(turns[-1].texts):
        turns.pop()  # nothing to continue
        continues = False
    if not turns:
        raise BadRequest("messages", "at least one message must have content")
    asked_format, format_path = _format(body)
    if continues and asked_format is not None:
        raise BadRequest(format_path, "cannot be combined with a final assistant message")
    tool_choice, parallel = _tool_choice(body.tool_choice)
    chat = ChatRequest(
        model=body.model,
        messages=[turn.message() for turn in turns],
        continue_final_message=continues or None,
        tools=_tools(body.tools),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        response_format=asked_format,
        **_reasoning(body, model_thinks),
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    )
    return Conversion(chat, _shown(body), [turn.path for turn in turns], format_path)


# ---- messages ----


def _turns(body: CountTokensRequest) -> list[Turn]:
    turns: list[Turn] = []
    system = _texts(body.system)
    if any(system):
        turns.append(Turn("system", "system", system))
    calls: set[str] = set()  # the ids of all calls so far
    for i, message in enumerate(body.messages):
        _add_message(turns, calls, message, f"messages[{i}]")
    return turns


def _add_message(turns: list[Turn], calls: set[str], message: GivenMessage, path: str) -> None:
    if isinstance(message.content, str):
        _turn(turns, message.role, path).texts.append(message.content)
        return
    if not message.content and message.role != "assistant":
        raise BadRequest(f"{path}.content", "at least one block is needed")
    if not message.content:
        _turn(turns, message.role, path)
    for i, block in enumerate(message.content):
        _add_block(turns, calls, message.role, block, path, f"{path}.content[{i}]")


def _add_block(
    turns: list[Turn],
    calls: set[str],
    role: Literal["user", "assistant", "system"],
    block: GivenBlock,
    message_path: str,
    path: str,
) -> None:
    match block:
        case GivenText(text=text):
            _turn(turns, role, message_path).texts.append(text)
        case GivenThinking() | GivenRedactedThinking() | GivenToolUse() if role != "assistant":
            raise BadRequest(f"{path}.type", f"only an assistant message may have {_kind(block)} blocks")
        case GivenThinking(thinking=thinking):
            _turn(turns, role, message_path).reasoning.append(thinking)
        case GivenRedactedThinking():
            _turn(turns, role, message_path)
        case GivenToolUse():
            calls.add(block.id)
            _turn(turns, role, message_path).calls.append(_call(block, path))
        case GivenToolResult():
            if role != "user":
                raise BadRequest(f"{path}.type", "only a user message may have tool_result blocks")
            if block.tool_use_id not in calls:
                raise BadRequest(f"{path}.tool_use_id", "no tool_use block before this one has that id")
            turns.append(Turn("tool", path, [_result(block)], answers=_own_id(block.tool_use_id)))


def _turn(turns: list[Turn], role: Literal["user", "assistant", "system"], path: str) -> Turn:
    """The current turn, or a new one: many templates reject two consecutive messages of one role."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role, path))
    return turns[-1]


def _call(block: GivenToolUse, path: str) -> MessageToolCall:
    try:
        arguments = msgspec.json.encode(block.input).decode()
    except RecursionError:
        raise BadRequest(f"{path}.input", "nested too deeply") from None
    return MessageToolCall(
        id=_own_id(block.id),
        type="function",
        function=CalledFunction(name=block.name, arguments=arguments),
    )


def _own_id(id: str) -> str:
    """The id as the parser made it, for templates that accept only their own kind."""
    return id.removeprefix(TOOL_ID) or id


def _result(block: GivenToolResult) -> str:
    text = "\n".join(_texts(block.content))
    return f"Error: {text}" if block.is_error else text


def _texts(given: str | Iterable[ResultText] | None) -> list[str]:
    if given is None:
        return []
    return [given] if isinstance(given, str) else [block.text for block in given]


def _kind(block: GivenBlock) -> str:
    return str(block.__struct_config__.tag)


# ---- the rest ----


def _tools(tools: list[GivenTool] | None) -> list[ToolDefinition] | None:
    if not tools:
        return None
    return [
        ToolDefinition(
            type="function",
            function=Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            ),
        )
        for tool in tools
    ]


def _tool_choice(choice: ToolChoice | None) -> tuple[str | NamedToolChoice | None, bool | None]:
    if choice is None:
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        if choice.name is not None:
            raise BadRequest("tool_choice.name", "only allowed with type: tool")
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type], parallel
    if choice.name is None:
        raise BadRequest("tool_choice.name", "name the tool to use", "missing_field")
    return NamedToolChoice(type="function", function=FunctionName(name=choice.name)), parallel


def _format(body: CountTokensRequest) -> tuple[ResponseFormat | None, str]:
    given: OutputFormat | None
    given, path = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if given is not None:
            raise BadRequest("output_format", "give either this or output_config.format")
        given, path = body.output_config.format, "output_config.format"
    if given is None:
        return None, path
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema)), path


def _reasoning(body: CountTokensRequest, model_thinks: bool) -> dict[str, Any]:
    """Templates use several names for one switch and ignore the names they do not know.

    Without thinking, a model whose template cannot turn it off has a budget of 0. Adaptive thinking is
    limited by the effort alone.
    """
    thinking = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    _check_budget(body)
    if thinking is not None and thinking.type == "adaptive":
        return {"reasoning_effort": effort}
    enabled = thinking is not None and thinking.type == "enabled"
    variables: dict[str, Any] = {"enable_thinking": enabled, "thinking": enabled}
    if effort is not None:
        variables["reasoning_effort"] = effort
    budget = thinking.budget_tokens if thinking is not None and enabled else 0
    return {
        "chat_template_kwargs": variables,
        "thinking_token_budget": budget if model_thinks else None,
    }


def _check_budget(body: CountTokensRequest) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and budget is None:
        raise BadRequest("thinking.budget_tokens", "this field is required", "missing_field")
    if thinking.type != "enabled" and budget is not None:
        raise BadRequest("thinking.budget_tokens", "only allowed with type: enabled")
    if isinstance(body, MessagesRequest) and budget is not None and budget >= body.max_tokens:
        raise BadRequest(
            "thinking.budget_tokens", f"must be less than max_tokens ({body.max_tokens}), got {budget}"
        )


def _shown(body: CountTokensRequest) -> ThinkingShown:
    if body.thinking is None or body.thinking.type == "disabled":
        return "no"
    return "omitted" if body.thinking.display == "omitted" else "yes"


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    """All but max_tokens, which is compared with the context when the prompt is known."""
    same = ("stream", "temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "cache_salt")
    return {"stop": body.stop_sequences or None, **{name: getattr(body, name) for name in same}}
