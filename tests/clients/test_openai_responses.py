"""The official openai SDK: /v1/responses, whole and streamed; kept, listed, continued and deleted."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.cases import case
from tests.clients.conftest import MODEL
from tests.clients.either import each, entered, parts_of, settled
from tests.clients.openai_clients import CLIENTS, client_of
from tests.clients.questions import CITY_SCHEMA, ROOM, TOOL_NAMES, Report, assert_city

__all__ = ["CLIENTS", "client_of"]  # read by conftest
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0}
QUESTION = "What is the capital of France?"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": CITY_SCHEMA, "strict": True}
    for name in sorted(TOOL_NAMES)
]


@case("responses", "whole", "streamed")
async def test_a_streamed_response_equals_a_whole_one(client: Any) -> None:
    options = {**ASKED, "input": QUESTION, "max_output_tokens": 20}
    whole = await settled(client.responses.create(**options))
    assert (whole.object, whole.status, whole.error) == ("response", "completed", None)
    assert whole.output_text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    events = await parts_of(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


@case("responses", "streamed")
async def test_the_streaming_helper_gives_the_final_response(client: Any) -> None:
    options = {**ASKED, "input": QUESTION, "max_output_tokens": 8}
    async with entered(client.responses.stream(**options)) as stream:
        kinds = {event.type async for event in each(stream)}
        final = await settled(stream.get_final_response())
    assert "response.output_text.delta" in kinds
    assert final.output_text
    assert final.status in ("completed", "incomplete")


@case("responses")
async def test_a_response_cut_by_its_length_says_so(client: Any) -> None:
    answer = await settled(
        client.responses.create(
            **ASKED, input=QUESTION, instructions="You are a pirate.", max_output_tokens=3
        )
    )
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 3


@case("responses: kept, listed, deleted")
async def test_a_response_is_kept_until_it_is_deleted(client: Any) -> None:
    made = await settled(client.responses.create(**ASKED, input=QUESTION, max_output_tokens=4))
    kept = await settled(client.responses.retrieve(made.id))
    assert (kept.id, kept.output_text) == (made.id, made.output_text)
    items = await settled(client.responses.input_items.list(made.id))
    assert [item.content[0].text async for item in each(items)] == [QUESTION]
    await settled(client.responses.delete(made.id))
    with pytest.raises(openai.NotFoundError):
        await settled(client.responses.retrieve(made.id))


@case("responses: kept, listed, deleted")
async def test_a_response_that_is_not_to_be_stored_is_not(client: Any) -> None:
    made = await settled(client.responses.create(**ASKED, input=QUESTION, max_output_tokens=2, store=False))
    with pytest.raises(openai.NotFoundError):
        await settled(client.responses.retrieve(made.id))


@case("responses: previous_response_id", "whole", "streamed")
async def test_a_response_goes_on_from_the_one_before(client: Any) -> None:
    first = await settled(client.responses.create(**ASKED, input=QUESTION, max_output_tokens=8))
    options = {**ASKED, "input": "And of Italy?", "max_output_tokens": 8}
    alone = await settled(client.responses.create(**options))
    whole = await settled(client.responses.create(**options, previous_response_id=first.id))
    assert whole.previous_response_id == first.id
    assert whole.usage.input_tokens > alone.usage.input_tokens + first.usage.output_tokens
    events = await parts_of(client.responses.create(**options, previous_response_id=first.id, stream=True))
    assert events[-1].response.output_text == whole.output_text


@case("responses: JSON schema", "whole", "streamed")
async def test_parse_makes_the_class_of_the_response(client: Any) -> None:
    options = {**ASKED, "input": QUESTION, "max_output_tokens": ROOM}
    whole = await settled(client.responses.parse(**options, text_format=Report))
    assert isinstance(whole.output_parsed, Report)
    async with entered(client.responses.stream(**options, text_format=Report)) as stream:
        final = await settled(stream.get_final_response())
    assert final.output_parsed == whole.output_parsed


@case("responses: tools", "whole", "streamed")
async def test_a_tool_is_called_and_its_result_goes_into_the_next_turn(client: Any) -> None:
    options = {**ASKED, "input": "What is the weather in Rome?", "tools": TOOLS, "max_output_tokens": 80}
    whole = await settled(
        client.responses.create(**options, tool_choice="required", parallel_tool_calls=False)
    )
    [call] = [item for item in whole.output if item.type == "function_call"]
    assert call.name in TOOL_NAMES
    assert_city(call.arguments)
    events = await parts_of(
        client.responses.create(**options, tool_choice="required", parallel_tool_calls=False, stream=True)
    )
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert [event.arguments for event in done] == [call.arguments] == [deltas]

    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'}
    after = await settled(
        client.responses.create(
            **ASKED,
            input=[result],
            previous_response_id=whole.id,
            tools=TOOLS,
            tool_choice="none",
            max_output_tokens=8,
        )
    )
    assert after.output_text
