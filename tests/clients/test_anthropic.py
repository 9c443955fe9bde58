"""The official anthropic SDK, blocking and asynchronous: /v1/messages, whole and streamed."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.cases import case
from tests.clients.conftest import KEY, MODEL, THINKER, TIMEOUT_S, Target
from tests.clients.either import each, entered, parts_of, settled
from tests.clients.questions import CITY_SCHEMA, QUESTION, ROOM, STOP, SYSTEM, TOOL_NAMES, TURNS, WHO, Report
from tests.clients.test_openai_errors import assert_idle

CLIENTS = ("anthropic", "anthropic (async)")
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
TOOLS: list[Any] = [
    {"name": name, "description": "Of a city", "input_schema": CITY_SCHEMA} for name in sorted(TOOL_NAMES)
]
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


def client_of(name: str, target: Target, **options: Any) -> anthropic.Anthropic | anthropic.AsyncAnthropic:
    kind = anthropic.AsyncAnthropic if name == "anthropic (async)" else anthropic.Anthropic
    return kind(
        **{"base_url": target.root, "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S, **options}
    )


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
async def test_a_streamed_message_equals_a_whole_one(client: Any) -> None:
    whole = await settled(client.messages.create(**GREEDY, messages=QUESTION))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.usage.input_tokens > 0

    events = await parts_of(client.messages.create(**GREEDY, messages=QUESTION, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == whole.content[0].text
    [last] = [event for event in events if event.type == "message_delta"]
    assert last.delta.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens > 0
    begun, ended = events[0].message.usage, whole.usage  # the second time, part of the prompt is cached
    told = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (begun, ended)]
    assert told[0] == told[1]


@case("chat", "streamed")
async def test_the_streaming_helper_gives_the_text_and_the_final_message(client: Any) -> None:
    async with entered(client.messages.stream(**GREEDY, messages=QUESTION)) as stream:
        text = "".join([piece async for piece in each(stream.text_stream)])
        final = await settled(stream.get_final_message())
    assert text == final.content[0].text
    assert final.stop_reason in ("end_turn", "max_tokens")


@case("several turns", "whole", "streamed")
@case("system prompt", "whole", "streamed")
@pytest.mark.parametrize(
    "system",
    [SYSTEM, [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]],
    ids=["text", "blocks"],
)
async def test_turns_and_a_system_prompt_change_the_answer(client: Any, system: Any) -> None:
    for before, options in (
        (TURNS[:-1], {"messages": TURNS[-1:]}),
        ([], {"messages": WHO, "system": system}),
    ):
        alone = await settled(client.messages.create(**GREEDY, messages=options["messages"]))
        options["messages"] = [*before, *options["messages"]]
        whole = await settled(client.messages.create(**GREEDY, **options))
        assert whole.content[0].text != alone.content[0].text
        async with entered(client.messages.stream(**GREEDY, **options)) as stream:
            final = await settled(stream.get_final_message())
        assert final.content[0].text == whole.content[0].text


@case("stop", "whole", "streamed")
async def test_the_text_ends_before_a_stop_sequence_and_names_it(client: Any) -> None:
    plain = await settled(client.messages.create(**GREEDY, messages=QUESTION))
    text = plain.content[0].text
    whole = await settled(client.messages.create(**GREEDY, messages=QUESTION, stop_sequences=["xyz", STOP]))
    async with entered(
        client.messages.stream(**GREEDY, messages=QUESTION, stop_sequences=["xyz", STOP])
    ) as stream:
        final = await settled(stream.get_final_message())
    for answer in (whole, final):
        assert answer.content[0].text == text[: text.index(STOP)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", STOP)


@case("JSON schema", "whole")
async def test_parse_makes_the_class_of_the_answer(client: Any) -> None:
    options = {**GREEDY, "max_tokens": ROOM}
    answer = await settled(client.messages.parse(**options, messages=QUESTION, output_format=Report))
    assert isinstance(answer.parsed_output, Report)


@case("tools: required", "whole", "streamed")
@case("tools: named", "whole", "streamed")
@case("tools: result in a second turn", "whole", "streamed")
@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}], ids=["any", "named"]
)
async def test_a_tool_is_used_and_its_result_goes_into_the_next_turn(client: Any, choice: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 80, "tools": TOOLS}
    choice = {**choice, "disable_parallel_tool_use": True}
    whole = await settled(client.messages.create(**options, messages=ASK_WEATHER, tool_choice=choice))
    [use] = [block for block in whole.content if block.type == "tool_use"]
    assert use.name in ({"get_time"} if choice["type"] == "tool" else TOOL_NAMES)
    assert use.input["city"] in ("Paris", "Rome", "Oslo")
    assert whole.stop_reason == "tool_use"
    async with entered(client.messages.stream(**options, messages=ASK_WEATHER, tool_choice=choice)) as stream:
        kinds = [event.type async for event in each(stream)]
        final = await settled(stream.get_final_message())
    assert "input_json" in kinds
    [streamed] = [block for block in final.content if block.type == "tool_use"]
    assert (streamed.name, streamed.input, final.stop_reason) == (use.name, use.input, "tool_use")

    result = {"type": "tool_result", "tool_use_id": use.id, "content": "clear, 21 degrees"}
    turns = [
        *ASK_WEATHER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]},
        {"role": "user", "content": [result]},
    ]
    options = {**options, "max_tokens": 8, "tool_choice": {"type": "none"}}
    after = await settled(client.messages.create(**options, messages=turns))
    assert after.content[0].text
    async with entered(client.messages.stream(**options, messages=turns)) as stream:
        assert (await settled(stream.get_final_message())).content[0].text == after.content[0].text


@case("tools: auto", "whole", "streamed")
async def test_a_model_may_answer_although_there_are_tools(client: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 24, "tools": TOOLS, "messages": ASK_WEATHER}
    whole = await settled(client.messages.create(**options))
    async with entered(client.messages.stream(**options)) as stream:
        final = await settled(stream.get_final_message())
    assert whole.content
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.stop_reason == whole.stop_reason


@case("reasoning", "whole", "streamed")
async def test_what_a_model_thinks_is_a_block_before_its_answer(client: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "model": THINKER, "max_tokens": 1040, "messages": QUESTION}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = await settled(client.messages.create(**options))
    assert whole.content[0].type == "thinking"
    assert whole.content[0].thinking
    assert whole.usage.model_dump()["output_tokens_details"] == {"thinking_tokens": 1024}
    async with entered(client.messages.stream(**options)) as stream:
        final = await settled(stream.get_final_message())
    shown = {"type", "thinking", "signature", "text"}
    assert [block.model_dump(include=shown) for block in final.content] == [
        block.model_dump(include=shown) for block in whole.content
    ]


@case("count tokens")
async def test_counted_tokens_are_those_that_a_message_is_billed_for(client: Any) -> None:
    question: dict[str, Any] = {"model": MODEL, "messages": TURNS, "system": SYSTEM}
    counted = await settled(client.messages.count_tokens(**question))
    made = await settled(client.messages.create(**question, max_tokens=1))
    usage = made.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@case("error: unknown model", "whole", "streamed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_unknown_model_is_not_found(client: Any, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await settled(
            client.messages.create(model="claude-9", max_tokens=2, messages=QUESTION, stream=stream)
        )
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"


@case("error: bad field", "whole", "streamed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_bad_field_is_a_bad_request_that_names_it(client: Any, stream: bool) -> None:
    options = {**GREEDY, "max_tokens": 0}
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        await settled(client.messages.create(**options, messages=QUESTION, stream=stream))
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@case("error: wrong key")
async def test_a_wrong_key_is_an_authentication_error(client_name: str, target: Target) -> None:
    stranger: Any = client_of(client_name, target, api_key="sk-of-somebody-else")
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await settled(stranger.messages.create(**GREEDY, messages=QUESTION))
    assert caught.value.body["error"]["type"] == "authentication_error"
    await settled(stranger.close())


@case("timeout")
async def test_a_client_that_waits_no_longer_gives_up_and_frees_the_engine(
    client: Any, target: Target
) -> None:
    options = {**GREEDY, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(anthropic.APITimeoutError):
        await settled(client.with_options(timeout=0.5).messages.create(**options, messages=QUESTION))
    await assert_idle(target)


@case("leaving a stream", "streamed")
async def test_a_client_that_leaves_its_stream_frees_the_engine(client: Any, target: Target) -> None:
    options = {**GREEDY, "max_tokens": 4000}
    stream = await settled(client.messages.create(**options, messages=QUESTION, stream=True))
    async for _ in each(stream):
        break
    await settled(stream.close())
    await assert_idle(target)
