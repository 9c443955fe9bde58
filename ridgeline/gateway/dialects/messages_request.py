"""The fields of Anthropic's messages request that OpenAI's chat can express. Used by `messages_to_chat` only.

Fields under "ignored" do not change what the model is asked: they are dropped, and
docs/gateway-dialects.md lists them. A field that is not declared here is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.dialects.reading import NULL, Asked


class _Block(Asked, kw_only=True, frozen=True):
    # ignored: OpenAI's servers find prefixes by themselves
    cache_control: Any = None


class TextBlock(_Block, tag_field="type", tag="text", kw_only=True, frozen=True):
    text: str
    # ignored: part of an earlier answer
    citations: Any = None


class Source(Asked, kw_only=True, frozen=True):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: Any = None
    content: Any = None


class ImageBlock(_Block, tag_field="type", tag="image", kw_only=True, frozen=True):
    source: Source


class DocumentBlock(_Block, tag_field="type", tag="document", kw_only=True, frozen=True):
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Any = None


class ThinkingBlock(_Block, tag_field="type", tag="thinking", kw_only=True, frozen=True):
    thinking: str
    # ignored: only Anthropic can verify it
    signature: Any = None


class RedactedBlock(_Block, tag_field="type", tag="redacted_thinking", kw_only=True, frozen=True):
    # ignored: only Anthropic can decrypt it
    data: Any = None


class ToolUseBlock(_Block, tag_field="type", tag="tool_use", kw_only=True, frozen=True):
    id: str
    name: str
    input: msgspec.Raw
    # ignored: only the model can be the caller
    caller: Any = None


ResultBlock = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(_Block, tag_field="type", tag="tool_result", kw_only=True, frozen=True):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
)


class Message(Asked, kw_only=True, frozen=True):
    role: str
    content: str | list[Block]


class Tool(Asked, kw_only=True, frozen=True):
    name: str
    input_schema: msgspec.Raw = NULL
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: bool | None = None
    # ignored:
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


class ToolChoice(Asked, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Asked, kw_only=True, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Format(Asked, kw_only=True, frozen=True):
    type: str
    schema: msgspec.Raw


class OutputConfig(Asked, kw_only=True, frozen=True):
    format: Format | None = None
    effort: str | None = None
    task_budget: Any = None


class Metadata(Asked, kw_only=True, frozen=True):
    user_id: str | None = None


class MessagesAsked(Asked, kw_only=True, frozen=True):
    messages: list[Message]
    max_tokens: int
    model: str | None = None
    system: str | list[TextBlock] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # the older name of output_config.format
    metadata: Metadata | None = None
    # accepted if their values have no effect:
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None
    # ignored:
    cache_control: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
