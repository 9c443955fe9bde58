"""litellm, blocking and asynchronous, by its openai and its anthropic route."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, KEY, MODEL, THINKER, TIMEOUT_S, Target
from tests.clients.questions import (
    ASK_WEATHER,
    JSON_QUESTION,
    QUESTION,
    REPORT_SCHEMA,
    ROOM,
    STOP,
    SYSTEM,
    TEXTS,
    TOOLS,
    TURNS,
    WHO,
    Report,
    assert_city,
)

OPENAI, ANTHROPIC = CLIENTS = ("litellm (openai)", "litellm (anthropic)")


class Lite:
    """litellm has functions and no client: this holds what every call is given."""

    def __init__(self, name: str, target: Target) -> None:
        self.route = "openai" if name == OPENAI else "anthropic"
        base = target.v1 if name == OPENAI else target.root
        self.options: dict[str, Any] = {
            "api_base": base,
            "api_key": KEY,
            "timeout": TIMEOUT_S,
            "max_retries": 0,
        }

    def of(self, **options: Any) -> dict[str, Any]:
        asked = {"model": f"{self.route}/{MODEL}", "temperature": 0, "max_tokens": 8, "messages": QUESTION}
        return {**self.options, **asked, **options}

    def ask(self, **options: Any) -> Any:
        return litellm.completion(**self.of(**options))

    def streamed(self, **options: Any) -> Any:
        """The answer that litellm itself builds of a stream's parts."""
        parts = list(self.ask(**options, stream=True, stream_options={"include_usage": True}))
        return litellm.stream_chunk_builder(parts, messages=options.get("messages", QUESTION))


def client_of(name: str, target: Target) -> Lite:
    return Lite(name, target)


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
async def test_a_streamed_chat_equals_a_whole_one(client: Lite) -> None:
    whole, streamed = client.ask(), client.streamed()
    text = whole.choices[0].message.content
    assert text
    assert streamed.choices[0].message.content == text
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    later = await litellm.acompletion(**client.of())
    assert later.choices[0].message.content == text
    parts = [part async for part in await litellm.acompletion(**client.of(stream=True))]
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text


@case("several turns", "whole", "streamed")
@case("system prompt", "whole", "streamed")
def test_turns_and_a_system_prompt_change_the_answer(client: Lite) -> None:
    system = {"role": "system", "content": SYSTEM}
    for before, question in ((TURNS[:-1], TURNS[-1:]), ([system], WHO)):
        alone, whole = client.ask(messages=question), client.ask(messages=[*before, *question])
        text = whole.choices[0].message.content
        assert text != alone.choices[0].message.content
        assert client.streamed(messages=[*before, *question]).choices[0].message.content == text


@case("stop", "whole", "streamed")
def test_the_text_ends_before_a_stop_string(client: Lite) -> None:
    text = client.ask().choices[0].message.content
    stopped = text[: text.index(STOP)]
    assert client.ask(stop=[STOP]).choices[0].message.content == stopped
    assert client.streamed(stop=[STOP]).choices[0].message.content == stopped


@case("n", "whole", only=OPENAI)
@case("seed", "whole", only=OPENAI)
@case("logprobs", "whole", only=OPENAI)
def test_samples_of_a_seed_are_the_same_again_and_have_logprobs(client: Lite) -> None:
    first, again = (client.ask(n=2, seed=3, temperature=1, logprobs=True, top_logprobs=1) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(texts) == 2
    assert [choice.message.content for choice in again.choices] == texts
    for choice in first.choices:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


@case("JSON mode", "whole", "streamed", only=OPENAI)
def test_json_mode_writes_an_object(client: Lite) -> None:
    options = {"response_format": {"type": "json_object"}, "max_tokens": 64, "messages": JSON_QUESTION}
    text = client.ask(**options).choices[0].message.content
    assert isinstance(json.loads(text), dict)
    assert client.streamed(**options).choices[0].message.content == text


@case("JSON schema", "whole", "streamed")
def test_a_schema_holds(client: Lite) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT_SCHEMA, "strict": True}}
    whole = client.ask(response_format=form, max_tokens=ROOM)
    Report.model_validate_json(whole.choices[0].message.content)
    streamed = client.streamed(response_format=form, max_tokens=ROOM)
    assert json.loads(streamed.choices[0].message.content) == json.loads(whole.choices[0].message.content)


@case("tools: required", "whole", "streamed")
@case("tools: named", "whole", "streamed")
@case("tools: result in a second turn", "whole")
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["required", "named"]
)
def test_a_tool_is_called_and_its_result_goes_into_the_next_turn(client: Lite, choice: Any) -> None:
    options = {"messages": ASK_WEATHER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
    whole = client.ask(**options)
    call = whole.choices[0].message.tool_calls[0]
    assert_city(call.function.arguments)
    made = client.streamed(**options).choices[0].message.tool_calls[0]
    assert made.function.name == call.function.name
    assert json.loads(made.function.arguments) == json.loads(call.function.arguments)
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "clear, 21 degrees"}
        for each in whole.choices[0].message.tool_calls
    ]
    turns = [*ASK_WEATHER, whole.choices[0].message.model_dump(), *results]
    after = client.ask(messages=turns, tools=TOOLS, tool_choice="none")
    assert after.choices[0].message.content


@case("tools: auto", "whole", "streamed")
def test_a_model_may_answer_although_there_are_tools(client: Lite) -> None:
    options = {"messages": ASK_WEATHER, "tools": TOOLS}
    whole, streamed = client.ask(**options), client.streamed(**options)
    assert whole.choices[0].message.content or whole.choices[0].message.tool_calls
    assert (streamed.choices[0].message.content or "") == (whole.choices[0].message.content or "")


@case("reasoning", "whole", "streamed", only=OPENAI)
def test_what_a_model_thinks_comes_beside_what_it_answers(client: Lite) -> None:
    options = {
        "model": f"openai/{THINKER}",
        "extra_body": {"thinking_token_budget": 8, "guided_choice": ["yes", "no"]},
        "max_tokens": 64,
    }
    whole, streamed = client.ask(**options), client.streamed(**options)
    assert whole.choices[0].message.content in ("yes", "no")
    assert whole.choices[0].message.reasoning_content
    assert streamed.choices[0].message.reasoning_content == whole.choices[0].message.reasoning_content


@case("embeddings: float", "whole", only=OPENAI)
def test_embeddings_come_in_order(client: Lite) -> None:
    options = {**client.options, "model": f"openai/{EMBEDDER}", "encoding_format": "float"}
    answer = litellm.embedding(**options, input=TEXTS)
    assert [len(entry["embedding"]) for entry in answer.data] == [384, 384, 384]


@case("responses", "whole", "streamed", only=OPENAI)
def test_a_streamed_response_equals_a_whole_one(client: Lite) -> None:
    options = {**client.options, "model": f"openai/{MODEL}", "input": "What is the capital of France?"}
    whole = litellm.responses(**options, temperature=0, max_output_tokens=16)
    text = whole.output[0].content[0].text
    assert text
    events = list(litellm.responses(**options, temperature=0, max_output_tokens=16, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text


@case("error: unknown model", "whole", "streamed")
@case("error: bad field", "whole")
@case("error: wrong key", "whole")
def test_refusals_are_litellms_exceptions(client: Lite) -> None:
    unknown = f"{client.route}/gpt-9"
    with pytest.raises(litellm.NotFoundError):
        client.ask(model=unknown)
    with pytest.raises(litellm.NotFoundError):
        list(client.ask(model=unknown, stream=True))
    with pytest.raises(litellm.BadRequestError):
        client.ask(temperature=-1)
    with pytest.raises(litellm.AuthenticationError):
        client.ask(api_key="sk-of-somebody-else")


@case("error: prompt too long", "whole", "streamed")
def test_a_prompt_beyond_the_context_is_litellms_own_exception(client: Lite) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        client.ask(messages=long)
    with pytest.raises(litellm.ContextWindowExceededError):
        list(client.ask(messages=long, stream=True))
