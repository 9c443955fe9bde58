"""The bodies /v1/responses sends, as typed structs in OpenAI's shapes: the response, its items, its events.

Items are also what the store keeps, and what a conversation is rebuilt from.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.server.openai_api.response_bodies import ChatLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Typed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One of several kinds, distinguished by `type`."""


class InputText(_Typed, frozen=True, kw_only=True, tag="input_text"):
    text: str


class FileCitation(_Typed, frozen=True, kw_only=True, tag="file_citation"):
    """`index`: the place in the answer. Then, not in OpenAI's: what is cited, in the file's parsed text."""

    file_id: str
    filename: str
    index: int
    vector_store_id: str = ""
    begin: int = 0
    end: int = 0
    quote: str = ""


class OutputText(_Typed, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[FileCitation]
    logprobs: list[ChatLogprob]


class ReasoningText(_Typed, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


class SummaryText(_Typed, frozen=True, kw_only=True, tag="summary_text"):
    text: str


class MessageItem(_Typed, frozen=True, kw_only=True, tag="message"):
    """What somebody said: `input_text` of a user or system, `output_text` of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]


class ReasoningItem(_Typed, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: None = None
    status: ItemStatus


class FunctionCallItem(_Typed, frozen=True, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: ItemStatus


class CompactionItem(_Typed, frozen=True, kw_only=True, tag="compaction"):
    """What stands for the part of a conversation that was left out."""

    id: str
    encrypted_content: str


class FunctionCallOutputItem(_Typed, frozen=True, kw_only=True, tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus


class FileSearchResult(msgspec.Struct, frozen=True, kw_only=True):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, Any]
    text: str
    vector_store_id: str = ""
    begin: int = 0
    end: int = 0


class FileSearchCallItem(_Typed, frozen=True, kw_only=True, tag="file_search_call"):
    """`results` is there if `include` asks for it. `incomplete`: some files were still in progress."""

    id: str
    status: Literal["in_progress", "searching", "completed", "incomplete", "failed"]
    queries: list[str]
    results: list[FileSearchResult] | None = None


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | FileSearchCallItem
Item = OutputItem | FunctionCallOutputItem | CompactionItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # writing into the cache costs nothing here


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class FunctionTool(_Typed, frozen=True, kw_only=True, tag="function"):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class NamespaceTool(_Typed, frozen=True, kw_only=True, tag="namespace"):
    name: str
    description: str | None
    tools: list[FunctionTool]


class FileSearchTool(_Typed, frozen=True, kw_only=True, tag="file_search"):
    vector_store_ids: list[str]
    filters: Any
    max_num_results: int
    ranking_options: Any


class ShownFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class ShownText(msgspec.Struct, frozen=True, kw_only=True):
    format: ShownFormat
    verbosity: Literal["low", "medium", "high"] = "medium"


class ShownReasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None
    summary: None = None


class ShownToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    tools: list[dict[str, str]] | UnsetType = UNSET


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response, at any time of its life."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ShownReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ShownText
    tool_choice: str | ShownToolChoice
    tools: list[FunctionTool | NamespaceTool | FileSearchTool]  # those that the model is offered
    top_logprobs: int
    top_p: float
    presence_penalty: float = 0.0  # missing in responses stored by older versions
    frequency_penalty: float = 0.0
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[MessageItem | CompactionItem]
    usage: ResponseUsage


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class _Event(_Typed, frozen=True, kw_only=True):
    sequence_number: int


class _Lifecycle(_Event, frozen=True, kw_only=True):
    response: ResponseBody


class Created(_Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    pass


class Queued(_Lifecycle, frozen=True, kw_only=True, tag="response.queued"):
    pass


class InProgress(_Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    pass


class _OfOutput(_Event, frozen=True, kw_only=True):
    output_index: int


class ItemAdded(_OfOutput, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfOutput, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _OfItem(_OfOutput, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class _OfPart(_OfItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob]


class AnnotationAdded(_OfPart, frozen=True, kw_only=True, tag="response.output_text.annotation.added"):
    annotation_index: int
    annotation: FileCitation


class SearchInProgress(_OfItem, frozen=True, kw_only=True, tag="response.file_search_call.in_progress"):
    pass


class Searching(_OfItem, frozen=True, kw_only=True, tag="response.file_search_call.searching"):
    pass


class SearchCompleted(_OfItem, frozen=True, kw_only=True, tag="response.file_search_call.completed"):
    pass


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


ResponseEvent = (
    Created
    | Queued
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | AnnotationAdded
    | SearchInProgress
    | Searching
    | SearchCompleted
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
)
