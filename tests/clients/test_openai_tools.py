"""The official openai SDK: tools, called and answered, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.cases import case
from tests.clients.conftest import MODEL
from tests.clients.either import each, entered, parts_of, settled
from tests.clients.openai_clients import CLIENTS, client_of, joined
from tests.clients.questions import ASK_WEATHER, TOOL_NAMES, TOOLS, assert_city

__all__ = ["CLIENTS", "client_of"]  # read by conftest
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 80, "tools": TOOLS}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


@case("tools: required", "whole", "streamed")
@case("tools: named", "whole", "streamed")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_tool_that_must_be_called_is_called(client: Any, choice: Any) -> None:
    options = {**ASKED, "messages": ASK_WEATHER, "tool_choice": choice, "parallel_tool_calls": False}
    whole = await settled(client.chat.completions.create(**options))
    [answer] = whole.choices
    [call] = answer.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name in ({"get_time"} if choice is NAMED else TOOL_NAMES)
    assert_city(call.function.arguments)
    assert answer.finish_reason in ("tool_calls", "stop")

    [streamed] = joined(await parts_of(client.chat.completions.create(**options, stream=True)))
    assert [(made["name"], made["arguments"]) for made in streamed.calls] == [
        (call.function.name, call.function.arguments)
    ]
    assert not streamed.content
    assert not answer.message.content
    assert streamed.finish_reason == answer.finish_reason


@case("tools: required", "streamed")
async def test_the_streaming_helper_assembles_the_call(client: Any) -> None:
    options = {**ASKED, "messages": ASK_WEATHER, "tool_choice": "required"}
    async with entered(client.chat.completions.stream(**options)) as stream:
        events = [event async for event in each(stream)]
        final = await settled(stream.get_final_completion())
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [
        call.function.arguments for call in final.choices[0].message.tool_calls
    ]
    assert_city(done[0].arguments)


@case("tools: required", "whole")
async def test_parse_reads_the_arguments_of_a_strict_tool(client: Any) -> None:
    class GetLevel(BaseModel):
        warm: bool

    tool = openai.pydantic_function_tool(GetLevel, name="get_level")
    options = {**ASKED, "tools": [tool], "messages": ASK_WEATHER, "tool_choice": "required"}
    answer = await settled(client.chat.completions.parse(**options))
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, GetLevel)


@case("tools: auto", "whole", "streamed")
async def test_a_model_may_answer_although_there_are_tools(client: Any) -> None:
    options = {**ASKED, "messages": ASK_WEATHER, "max_tokens": 24}
    whole = await settled(client.chat.completions.create(**options))
    [answer] = whole.choices
    assert answer.message.content or answer.message.tool_calls
    [streamed] = joined(await parts_of(client.chat.completions.create(**options, stream=True)))
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []]
    assert [(call["name"], call["arguments"]) for call in streamed.calls] == calls
    assert (streamed.content or None) == (answer.message.content or None)
    assert streamed.finish_reason == answer.finish_reason


@case("tools: result in a second turn", "whole", "streamed")
async def test_a_tools_result_goes_into_the_next_turn(client: Any) -> None:
    first = await settled(
        client.chat.completions.create(**ASKED, messages=ASK_WEATHER, tool_choice="required")
    )
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "degrees": 21}'}
        for call in message.tool_calls
    ]
    turns = [*ASK_WEATHER, message, *results]
    options = {**ASKED, "max_tokens": 12, "tool_choice": "none"}
    whole = await settled(client.chat.completions.create(**options, messages=turns))
    before = await settled(client.chat.completions.create(**options, messages=ASK_WEATHER))
    assert whole.usage.prompt_tokens > before.usage.prompt_tokens
    assert whole.choices[0].message.content
    assert not whole.choices[0].message.tool_calls
    [streamed] = joined(
        await parts_of(client.chat.completions.create(**options, messages=turns, stream=True))
    )
    assert streamed.content == whole.choices[0].message.content
