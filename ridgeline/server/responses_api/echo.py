"""The initial response body: the request's fields with defaults filled in.

Large values are encoded here, off the event loop, once; three events of every stream carry them.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
from msgspec import UNSET

from ridgeline.server.answering.job import Job
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.responses_api import protocol
from ridgeline.server.responses_api.bodies import (
    FileSearchTool,
    FunctionTool,
    NamespaceTool,
    ResponseBody,
    ShownFormat,
    ShownReasoning,
    ShownText,
    ShownToolChoice,
)
from ridgeline.server.responses_api.file_search import DEFAULT_RESULTS
from ridgeline.server.responses_api.protocol import ResponseRequest, ResponseToolChoice

T = TypeVar("T")


def opening_body(body: ResponseRequest, job: Job, id: str, created_at: int, is_stored: bool) -> ResponseBody:
    return ResponseBody(
        id=id,
        created_at=created_at,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=_written(body.instructions),
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=_written(body.metadata or {}),
        model=job.served.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ShownReasoning(effort=body.reasoning.effort if body.reasoning else None),
        safety_identifier=body.safety_identifier,
        store=is_stored,
        temperature=job.params.temperature,
        text=_written(_text(body)),
        tool_choice=_tool_choice(body.tool_choice),
        tools=_written(_tools(body)),
        top_logprobs=body.top_logprobs or 0,
        top_p=job.params.top_p,
        presence_penalty=job.params.presence_penalty,
        frequency_penalty=job.params.frequency_penalty,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _written(value: T) -> T:
    """The value in its final encoded form, which the encoder copies."""
    return cast(T, msgspec.Raw(encode(value)))


def _tools(body: ResponseRequest) -> list[FunctionTool | NamespaceTool | FileSearchTool]:
    shown: list[FunctionTool | NamespaceTool | FileSearchTool] = []
    for tool in body.tools or ():
        if isinstance(tool, protocol.FunctionTool):
            shown.append(_function(tool))
        elif isinstance(tool, protocol.NamespaceTool):
            functions = [_function(inner) for inner in tool.tools]
            shown.append(NamespaceTool(name=tool.name, description=tool.description, tools=functions))
        elif isinstance(tool, protocol.FileSearchTool):
            shown.append(
                FileSearchTool(
                    vector_store_ids=tool.vector_store_ids,
                    filters=tool.filters,
                    max_num_results=tool.max_num_results or DEFAULT_RESULTS,
                    ranking_options=tool.ranking_options,
                )
            )
    return shown


def _function(tool: protocol.FunctionTool) -> FunctionTool:
    return FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
    )


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ShownToolChoice:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "function":
        return ShownToolChoice(type=choice.type, name=choice.name or "")
    tools = [{"type": tool.type, "name": tool.name or ""} for tool in choice.tools or ()]
    return ShownToolChoice(type=choice.type, mode=choice.mode or "auto", tools=tools)


def _text(body: ResponseRequest) -> ShownText:
    asked = body.text.format if body.text else None
    verbosity = (body.text.verbosity if body.text else None) or "medium"
    if asked is None:
        return ShownText(format=ShownFormat(type="text"), verbosity=verbosity)
    return ShownText(
        verbosity=verbosity,
        format=ShownFormat(
            type=asked.type,
            name=_given(asked.name),
            description=_given(asked.description),
            schema=_given(asked.schema),
            strict=True if asked.type == "json_schema" else UNSET,
        ),
    )


def _given(value: T | None) -> T | Any:
    return UNSET if value is None else value
