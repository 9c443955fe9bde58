"""LangChain's two chat models, by /v1/chat/completions and by /v1/messages, and its embeddings."""

from __future__ import annotations

import json
import math
from typing import Any

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, KEY, MODEL, TIMEOUT_S, Target
from tests.clients.questions import JSON_QUESTION, ROOM, SYSTEM, TEXTS, TOOL_NAMES, Report
from tests.clients.test_openai_errors import assert_idle

OPENAI, ANTHROPIC = CLIENTS = ("langchain-openai", "langchain-anthropic")
QUESTION = "What is the capital of France?"
TURNS = [HumanMessage(QUESTION), AIMessage("The capital of France is Paris."), HumanMessage("And of Italy?")]


@tool
def get_weather(warm: bool) -> str:
    """The weather in a city."""
    return f"clear and {'warm' if warm else 'cold'}"


@tool
def get_time(warm: bool) -> str:
    """The time in a city."""
    return "noon"


def client_of(name: str, target: Target, **options: Any) -> ChatOpenAI | ChatAnthropic:
    options = {
        "model": MODEL,
        "api_key": KEY,
        "max_retries": 0,
        "timeout": TIMEOUT_S,
        "max_tokens": 8,
        **options,
    }
    if name == OPENAI:
        return ChatOpenAI(base_url=target.v1, temperature=0, **options)
    return ChatAnthropic(base_url=target.root, model_kwargs={"extra_body": {"temperature": 0}}, **options)


def summed(parts: Any) -> AIMessageChunk:
    """The message that the parts of a stream add up to."""
    first, *rest = parts
    for part in rest:
        first += part
    return first


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
async def test_a_streamed_chat_equals_a_whole_one(client: Any) -> None:
    whole = client.invoke(QUESTION)
    streamed = summed(client.stream(QUESTION, stream_usage=True))
    assert whole.text
    assert streamed.text == whole.text
    assert (await client.ainvoke(QUESTION)).text == whole.text
    assert summed([part async for part in client.astream(QUESTION)]).text == whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [streamed.usage_metadata[name] for name in counts] == [
        whole.usage_metadata[name] for name in counts
    ]


@case("several turns", "whole", "streamed")
@case("system prompt", "whole", "streamed")
def test_turns_and_a_system_prompt_change_the_answer(client: Any) -> None:
    for before, question in (
        (TURNS[:-1], TURNS[-1]),
        ([SystemMessage(SYSTEM)], HumanMessage("Who are you?")),
    ):
        alone, whole = client.invoke([question]), client.invoke([*before, question])
        assert whole.text != alone.text
        assert summed(client.stream([*before, question])).text == whole.text


@case("stop", "whole", "streamed")
def test_the_text_ends_before_a_stop_string(client: Any) -> None:
    text = client.invoke(QUESTION).text
    assert "France" in text
    stopped = text[: text.index("France")]
    assert client.invoke(QUESTION, stop=["France"]).text == stopped
    assert summed(client.stream(QUESTION, stop=["France"])).text == stopped


@case("logprobs", "whole", "streamed", only=OPENAI)
def test_logprobs_are_of_the_tokens_of_the_text(client: Any) -> None:
    model = client.model_copy(update={"max_tokens": 4}).bind(logprobs=True, top_logprobs=2)
    for message in (model.invoke(QUESTION), summed(model.stream(QUESTION))):
        tokens = [entry["token"] for entry in message.response_metadata["logprobs"]["content"]]
        assert "".join(tokens) == message.text


@case("n", "whole", only=OPENAI)
@case("seed", "whole", only=OPENAI)
def test_a_seed_gives_the_same_samples_again(client: Any) -> None:
    model = client.model_copy(update={"n": 2, "seed": 5, "temperature": 1.0})
    first, again = (model.generate([[HumanMessage(QUESTION)]]).generations[0] for _ in range(2))
    assert len(first) == 2
    assert [sample.text for sample in first] == [sample.text for sample in again]


@case("JSON schema", "whole", "streamed")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_its_class(client: Any, method: str) -> None:
    roomy = client.model_copy(update={"max_tokens": ROOM})
    model = roomy.with_structured_output(Report, method=method)
    whole = model.invoke(QUESTION)
    assert isinstance(whole, Report)
    assert list(model.stream(QUESTION))[-1] == whole


@case("JSON mode", "whole", only=OPENAI)
def test_json_mode_writes_an_object(client: Any) -> None:
    roomy = client.model_copy(update={"max_tokens": 96})
    message = roomy.bind(response_format={"type": "json_object"}).invoke(JSON_QUESTION[0]["content"])
    assert isinstance(json.loads(message.text), dict)


@case("tools: required", "whole", "streamed")
@case("tools: named", "whole", "streamed")
@case("tools: result in a second turn", "whole", "streamed")
@pytest.mark.parametrize("choice", ["any", "get_time"])
def test_a_tool_is_called_and_its_result_goes_into_the_next_turn(client: Any, choice: str) -> None:
    roomy = client.model_copy(update={"max_tokens": 80})
    model = roomy.bind_tools(
        [get_weather, get_time], tool_choice=choice, parallel_tool_calls=False, strict=True
    )
    asked = [HumanMessage("What is the weather in Rome?")]
    whole = model.invoke(asked)
    [call] = whole.tool_calls
    assert call["name"] in ({"get_time"} if choice == "get_time" else TOOL_NAMES)
    assert isinstance(call["args"]["warm"], bool)
    [streamed] = summed(model.stream(asked)).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])

    result = {"get_weather": get_weather, "get_time": get_time}[call["name"]].invoke(call)
    assert isinstance(result, ToolMessage)
    turns = [*asked, whole, result]
    none: Any = "none" if isinstance(client, ChatOpenAI) else {"type": "none"}
    after = client.bind_tools([get_weather, get_time], tool_choice=none)
    final = after.invoke(turns)
    assert final.text
    assert not final.tool_calls
    assert summed(after.stream(turns)).text == final.text


@case("tools: auto", "whole", "streamed")
def test_a_model_may_answer_although_there_are_tools(client: Any) -> None:
    model = client.bind_tools([get_weather, get_time])
    whole, streamed = model.invoke(QUESTION), summed(model.stream(QUESTION))
    assert whole.text or whole.tool_calls
    assert streamed.text == whole.text


@case("responses", "whole", "streamed", only=OPENAI)
@case("responses: previous_response_id", "whole", only=OPENAI)
def test_the_responses_api_gives_the_same_text(client: Any, target: Target) -> None:
    model: Any = client_of(OPENAI, target, use_responses_api=True, max_tokens=16)
    whole = model.invoke(QUESTION)
    assert whole.text
    assert summed(model.stream(QUESTION)).text == whole.text
    after = model.invoke("And of Italy?", previous_response_id=whole.response_metadata["id"])
    assert after.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]


@case("embeddings: float", "whole", only=OPENAI)
def test_embeddings_of_documents_and_queries(client: Any, target: Target) -> None:
    """As texts: by default it sends token ids of OpenAI's vocabulary, which no other model shares."""
    embeddings = OpenAIEmbeddings(
        model=EMBEDDER, base_url=target.v1, api_key=KEY, check_embedding_ctx_length=False
    )
    documents = embeddings.embed_documents(TEXTS)
    assert len(documents) == len(TEXTS)
    assert math.dist(embeddings.embed_query(TEXTS[0]), documents[0]) < 1e-3


@case("count tokens", "whole", only=ANTHROPIC)
def test_tokens_are_counted_by_the_server(client: Any) -> None:
    counted = client.get_num_tokens_from_messages(TURNS)
    assert counted == client.invoke(TURNS).usage_metadata["input_tokens"]


@case("error: unknown model", "whole", "streamed")
@case("error: bad field", "whole")
@case("error: wrong key", "whole")
def test_refusals_are_the_exceptions_of_the_sdk_beneath(client_name: str, target: Target) -> None:
    sdk: Any = openai if client_name == OPENAI else anthropic
    with pytest.raises(sdk.NotFoundError):
        client_of(client_name, target, model="gpt-9").invoke(QUESTION)
    with pytest.raises(sdk.NotFoundError):
        list(client_of(client_name, target, model="gpt-9").stream(QUESTION))
    with pytest.raises(sdk.BadRequestError):
        client_of(client_name, target, max_tokens=-1).invoke(QUESTION)
    with pytest.raises(sdk.AuthenticationError):
        client_of(client_name, target, api_key="sk-of-somebody-else").invoke(QUESTION)


@case("leaving a stream", "streamed")
async def test_a_client_that_leaves_its_stream_frees_the_engine(client: Any, target: Target) -> None:
    stream = client.model_copy(update={"max_tokens": 4000}).stream("Tell me a very long story.")
    next(stream)
    stream.close()
    await assert_idle(target)
