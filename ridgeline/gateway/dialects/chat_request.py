"""The fields of OpenAI's chat request that Anthropic's API can express. Used by `chat_to_messages` only.

Fields under "ignored" do not change what the model is asked: they are dropped, and
docs/gateway-dialects.md lists them. A field that is not declared here is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.dialects.reading import NULL, Asked


class TextPart(Asked, tag_field="type", tag="text", kw_only=True, frozen=True):
    text: str
    cache_control: Any = None
    # ignored:
    prompt_cache_breakpoint: Any = None


class ImageUrl(Asked, kw_only=True, frozen=True):
    url: str
    # ignored:
    detail: Any = None


class ImagePart(Asked, tag_field="type", tag="image_url", kw_only=True, frozen=True):
    image_url: ImageUrl
    cache_control: Any = None
    # ignored:
    prompt_cache_breakpoint: Any = None


class File(Asked, kw_only=True, frozen=True):
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class FilePart(Asked, tag_field="type", tag="file", kw_only=True, frozen=True):
    file: File
    cache_control: Any = None
    # ignored:
    prompt_cache_breakpoint: Any = None


class RefusalPart(Asked, tag_field="type", tag="refusal", kw_only=True, frozen=True):
    refusal: str


class AudioPart(Asked, tag_field="type", tag="input_audio", kw_only=True, frozen=True):
    input_audio: Any = None


Part = TextPart | ImagePart | FilePart | RefusalPart | AudioPart


class CalledFunction(Asked, kw_only=True, frozen=True):
    name: str
    arguments: str


class ToolCall(Asked, kw_only=True, frozen=True):
    id: str
    function: CalledFunction | None = None
    type: str = "function"
    custom: Any = None
    cache_control: Any = None
    # ignored:
    index: Any = None


class _Message(Asked, kw_only=True, frozen=True):
    name: str | None = None
    cache_control: Any = None
    # ignored: part of an earlier answer
    id: Any = None


class SystemMessage(_Message, tag_field="role", tag="system", kw_only=True, frozen=True):
    content: str | list[Part]


class DeveloperMessage(_Message, tag_field="role", tag="developer", kw_only=True, frozen=True):
    content: str | list[Part]


class UserMessage(_Message, tag_field="role", tag="user", kw_only=True, frozen=True):
    content: str | list[Part]


class ThinkingBlock(Asked, kw_only=True, frozen=True):
    """As in the gateway's own answers, so that Anthropic gets its thinking back."""

    type: str
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    # ignored:
    index: Any = None


class AssistantMessage(_Message, tag_field="role", tag="assistant", kw_only=True, frozen=True):
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    thinking_blocks: list[ThinkingBlock] | None = None
    function_call: Any = None
    audio: Any = None
    # ignored: Anthropic accepts thinking only with its signature
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    annotations: Any = None


class ToolMessage(_Message, tag_field="role", tag="tool", kw_only=True, frozen=True):
    tool_call_id: str
    content: str | list[Part] | None = None


class FunctionMessage(_Message, tag_field="role", tag="function", kw_only=True, frozen=True):
    content: Any = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class Function(Asked, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    cache_control: Any = None


class Tool(Asked, kw_only=True, frozen=True):
    type: str
    function: Function | None = None
    custom: Any = None
    cache_control: Any = None


class NamedTool(Asked, kw_only=True, frozen=True):
    name: str


class ToolChoice(Asked, kw_only=True, frozen=True):
    type: str
    function: NamedTool | None = None
    custom: Any = None
    allowed_tools: Any = None


class JsonSchema(Asked, kw_only=True, frozen=True):
    schema: msgspec.Raw = NULL
    # ignored: the schema is always enforced, and its name is for readers
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Asked, kw_only=True, frozen=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = NULL  # of json_object or json_schema, as llama.cpp accepts it


class StreamOptions(Asked, kw_only=True, frozen=True):
    include_usage: bool | None = None
    # ignored:
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None


class ChatAsked(Asked, kw_only=True, frozen=True):
    messages: list[Message]
    model: str | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    thinking: Any = None  # Anthropic's own field, for clients that know their upstream
    cache_control: Any = None  # the same
    user: str | None = None
    safety_identifier: str | None = None
    # accepted if their values have no effect:
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    moderation: Any = None
    # ignored:
    stream_options: StreamOptions | None = None
    seed: Any = None  # best effort at OpenAI too
    store: Any = None  # chat completions are not stored here
    metadata: Any = None  # of stored answers
    verbosity: Any = None
    service_tier: Any = None
    prediction: Any = None  # affects speed only
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
