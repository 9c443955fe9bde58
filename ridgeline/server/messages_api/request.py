"""The bodies of /v1/messages and /v1/messages/count_tokens as clients send them.

Decoded here for `handlers`; `conversion` turns them into a chat request. Blocks that are not here (images,
documents, server tools and their results) are refused with their name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from ridgeline.server.errors import BadRequest
from ridgeline.server.http.body_fields import About, Body, ignored, refused
from ridgeline.server.http.common_fields import (
    CacheHintField,
    EndUserField,
    ModelField,
    StreamField,
    TemperatureField,
    ToolDescriptionField,
    TopKField,
    TopPField,
)
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.field_types import Int, Name, Salt, Seed
from ridgeline.server.http.limits import MAX_MESSAGES, MAX_TOOLS

MAX_BLOCKS = 10_000  # of one message
MAX_ID_CHARACTERS = 200

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
TOOLSET = refused("toolsets are Anthropic's own; none is served here")
# Keeps all there is, which is what is done anyway. Claude Code sends it.
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class GivenText(Body, kw_only=True, frozen=True, tag_field="type", tag="text"):
    text: Annotated[str, About("the text")]
    cache_control: CacheHintField = None
    citations: Annotated[Any, refused("citations are not supported", [])] = None


class GivenThinking(Body, kw_only=True, frozen=True, tag_field="type", tag="thinking"):
    thinking: Annotated[str, About("an assistant's reasoning that is sent back; the template may use it")]
    signature: Annotated[str | None, ignored("not checked: the text alone counts")] = None
    cache_control: CacheHintField = None


class GivenRedactedThinking(Body, kw_only=True, frozen=True, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str, ignored("only the server that made it can read it")]
    cache_control: CacheHintField = None


class GivenToolUse(Body, kw_only=True, frozen=True, tag_field="type", tag="tool_use"):
    id: Annotated[Id, About("what the result names in `tool_use_id`; up to 200 characters")]
    name: Annotated[Name, About("the tool's name")]
    input: Annotated[dict[str, Any], About("the arguments")]
    cache_control: CacheHintField = None
    caller: Annotated[Any, refused("only the model itself calls tools here", {"type": "direct"})] = None
    toolset_name: Annotated[Any, TOOLSET] = None


class ResultText(Body, kw_only=True, frozen=True):
    type: Annotated[Literal["text"], About("`text`")]
    text: Annotated[str, About("the text")]
    cache_control: CacheHintField = None
    citations: Annotated[Any, refused("citations are not supported", [])] = None


class GivenToolResult(Body, kw_only=True, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: Annotated[Id, About("the call that this answers; it must stand earlier in `messages`")]
    content: Annotated[
        str | Annotated[list[ResultText], msgspec.Meta(max_length=MAX_BLOCKS)] | None,
        About("text, or text blocks, which are joined with a newline"),
    ] = None
    is_error: Annotated[bool | None, About("true: the model reads `Error: ` before the content")] = None
    cache_control: CacheHintField = None
    toolset_name: Annotated[Any, TOOLSET] = None


GivenBlock = GivenText | GivenThinking | GivenRedactedThinking | GivenToolUse | GivenToolResult


class GivenMessage(Body, kw_only=True, frozen=True):
    role: Annotated[Literal["user", "assistant", "system"], About("neighbours of one role become one turn")]
    content: Annotated[
        str | Annotated[list[GivenBlock], msgspec.Meta(max_length=MAX_BLOCKS)],
        About("text, or blocks; texts of one turn are joined with a newline"),
    ]


class GivenTool(Body, kw_only=True, frozen=True):
    name: Annotated[Name, About("1 to 64 of a-z, A-Z, 0-9, _ and -")]
    input_schema: Annotated[dict[str, Any], About("JSON schema of the input, an object's")]
    description: ToolDescriptionField = None
    type: Annotated[Literal["custom"] | None, About("`custom`; server tools are refused")] = None
    strict: Annotated[bool | None, About("the input always follows the schema")] = None
    cache_control: CacheHintField = None
    eager_input_streaming: Annotated[bool | None, ignored("input is always streamed as it is made")] = None
    input_examples: Annotated[Any, ignored("the model is not shown them")] = None
    allowed_callers: Annotated[Any, refused("only the model itself calls tools here", ["direct"], [])] = None
    defer_loading: Annotated[Any, refused("every tool is shown to the model", False)] = None


class ToolChoice(Body, kw_only=True, frozen=True):
    type: Annotated[Literal["auto", "any", "tool", "none"], About("`tool`: the one that is named")]
    name: Annotated[Name | None, About("with `tool`")] = None
    disable_parallel_tool_use: Annotated[bool | None, About("true: at most one call")] = None


class Thinking(Body, kw_only=True, frozen=True):
    type: Annotated[
        Literal["enabled", "adaptive", "disabled"],
        About("`enabled`: up to `budget_tokens`; `adaptive`: as the model likes; `disabled`: as if absent"),
    ]
    budget_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1024, lt=2**31)] | None,
        About("most tokens of reasoning, at least 1024 and less than `max_tokens`; with `enabled`"),
    ] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None, About("`omitted`: thinking blocks come without their text")
    ] = None


class OutputFormat(Body, kw_only=True, frozen=True):
    type: Annotated[Literal["json_schema"], About("`json_schema`")]
    schema: Annotated[dict[str, Any], About("the JSON schema that the answer's text follows")]


class OutputConfig(Body, kw_only=True, frozen=True):
    format: Annotated[OutputFormat | None, About("the shape of the answer's text")] = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        About("given to the template; limits `adaptive` thinking, by `--reasoning-budget`"),
    ] = None
    task_budget: Annotated[Any, refused("task budgets are not supported")] = None


class Metadata(Body, kw_only=True, frozen=True):
    user_id: Annotated[str | None, ignored("an end user's name")] = None


class CountTokensRequest(Body, kw_only=True, frozen=True):
    """All that decides what the model reads."""

    model: ModelField = None
    messages: Annotated[
        Annotated[list[GivenMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)],
        About("the conversation; a last message of the assistant's is continued"),
    ]
    system: Annotated[
        str | Annotated[list[ResultText], msgspec.Meta(max_length=MAX_BLOCKS)] | None,
        About("text, or text blocks, which are joined with a newline"),
    ] = None
    tools: Annotated[
        Annotated[list[GivenTool], msgspec.Meta(max_length=MAX_TOOLS)] | None,
        About("tools the model may use; up to 128"),
    ] = None
    tool_choice: Annotated[ToolChoice | None, About("`auto` is the default with tools")] = None
    thinking: Annotated[Thinking | None, About("absent: no thinking is asked for, and none shown")] = None
    output_config: Annotated[OutputConfig | None, About("effort, and the shape of the answer's text")] = None
    output_format: Annotated[OutputFormat | None, About("the older name of `output_config.format`")] = None
    cache_control: CacheHintField = None
    container: Annotated[Any, refused("containers are not supported")] = None
    mcp_servers: Annotated[Any, refused("MCP servers are the client's to call", [])] = None
    context_management: Annotated[
        Any, refused("the conversation is taken as it is sent", {}, {"edits": []}, KEEP_ALL)
    ] = None
    speed: Annotated[Any, ignored("there is one speed")] = None
    user_profile_id: EndUserField = None
    workspace_id: Annotated[Any, ignored("there is one workspace")] = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    max_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, lt=2**31)],
        About("most tokens to make; what the context leaves, where that is less"),
    ]
    stream: StreamField = None
    stop_sequences: Annotated[
        Annotated[list[StopSequence], msgspec.Meta(max_length=16)] | None,
        About("up to 16 strings, of up to 1024 characters; the text ends before one"),
    ] = None
    temperature: TemperatureField = None
    top_p: TopPField = None
    top_k: TopKField = None
    seed: Annotated[Seed | None, About("ours: same seed, same text, whatever else the server computes")] = (
        None
    )
    ignore_eos: Annotated[bool | None, About("ours: do not stop at the end-of-sequence token")] = None
    priority: Annotated[
        Int | None, About("ours: lower is served first; default 0; from 1000 on, in the gaps of all others")
    ] = None
    cache_salt: Annotated[
        Salt | None, About("ours: requests share cached prefixes only with the same salt")
    ] = None
    metadata: Annotated[Metadata | None, ignored("nothing is stored")] = None
    service_tier: Annotated[Any, ignored("there is one tier")] = None
    inference_geo: Annotated[Any, ignored("there is one place")] = None
    diagnostics: Annotated[Any, ignored("none are made")] = None


class _Kind(msgspec.Struct):
    type: Any = None


class _Kinds(msgspec.Struct):
    tools: list[_Kind] = []


_TOOL = re.compile(r"tools\[(\d+)\]")
_BLOCK_TYPE = re.compile(r"(messages\[\d+\]\.content|system)(\[\d+\](\.content\[\d+\])?)\.type")
_UNKNOWN = re.compile(r"[Ii]nvalid (?:enum )?value '(.{0,64})", re.DOTALL)


def decoded(raw: bytes, body: type[CountTokensRequest]) -> Any:
    """The body; what Anthropic's own servers know and we do not is refused by its kind, not by its fields."""
    try:
        return decode(raw, body)
    except BadRequest as error:
        param = error.reply.param or ""
        if tool := _TOOL.match(param):
            _refuse_server_tool(raw, int(tool[1]))
        unknown = _UNKNOWN.search(error.reply.message)
        if unknown and _BLOCK_TYPE.fullmatch(param):
            kind = unknown[1].removesuffix("'")
            raise BadRequest(param, f"{kind!r} blocks are not supported here", "unsupported_field") from None
        raise


def _refuse_server_tool(raw: bytes, number: int) -> None:
    try:
        kind = msgspec.json.decode(raw, type=_Kinds).tools[number].type
    except (msgspec.DecodeError, IndexError, RecursionError):
        return
    if isinstance(kind, str) and kind != "custom":
        message = (
            f"{kind[:64]!r} tools run on Anthropic's servers or have their schemas; only custom ones do here"
        )
        raise BadRequest(f"tools[{number}].type", message, "unsupported_field")
