"""What /v1/messages answers with, in Anthropic's shapes: a message, or the events that it is made of."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str  # no `citations`: nothing is cited, and @ai-sdk/anthropic refuses a null


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The three counts of input add up to the prompt. Tokens are cached without being asked, and without a
    price, so none are ever counted as written to the cache.
    """

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class DeltaUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


# ---- events ----


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: DeltaUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: ErrorType
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Every error as Anthropic's clients expect it: a body, or the last event of a stream that broke off."""

    error: MessagesErrorDetail
    request_id: str


BlockStep = ContentBlockStart | ContentBlockDelta | ContentBlockStop
MessageEvent = MessageStart | Ping | BlockStep | MessageDelta | MessageStop | MessagesError
