"""The fields of OpenAI's responses request that work without state. Used by `responses_to_chat` only.

Fields under "ignored" do not change what the model is asked: they are dropped, and
docs/gateway-dialects.md lists them. A field that is not declared here is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.gateway.dialects.reading import NULL, Asked


class Part(Asked, kw_only=True, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    file_id: Any = None
    file_url: Any = None
    input_audio: Any = None
    # ignored:
    detail: Any = None
    annotations: Any = None  # of an earlier answer
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class Item(Asked, kw_only=True, frozen=True):
    """An item of any type; a message may omit its type."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None
    namespace: str | None = None
    # ignored: a summary is for readers; the rest is part of an earlier answer
    summary: Any = None
    id: Any = None
    status: Any = None
    phase: Any = None
    caller: Any = None


class Tool(Asked, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    tools: list[Tool] | None = None  # of a namespace
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    # ignored:
    output_schema: Any = None
    allowed_callers: Any = None
    defer_loading: Any = None


class ChosenTool(Asked, kw_only=True, frozen=True):
    type: str = "function"
    name: str | None = None


class ToolChoice(Asked, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ChosenTool] | None = None


class Format(Asked, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    schema: msgspec.Raw = NULL
    description: str | None = None
    strict: bool | None = None


class TextOptions(Asked, kw_only=True, frozen=True):
    format: Format | None = None
    # ignored:
    verbosity: Any = None


class Reasoning(Asked, kw_only=True, frozen=True):
    effort: str | None = None
    # ignored: the reasoning itself is sent
    summary: Any = None
    generate_summary: Any = None


class ResponsesAsked(Asked, kw_only=True, frozen=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # accepted if their values have no effect:
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    # ignored:
    client_metadata: Any = None
    metadata: Any = None
    stream_options: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None  # of tools that a server runs itself
