"""Generate over gRPC is the HTTP API's generation: the same job, and streamed answers equal whole ones."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ridgeline.web.grpc import bodies
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from tests.server.grpc.rpc_stage import HELLO, hello, joined, rpc_served, streamed, unnamed
from tests.server.scripted_client import flood, say
from tests.server.stage import CHAT, COMPLETIONS, Stage

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def fields(**more: Any) -> dict[str, Any]:
    """Every sampling field, as keywords of the message and as fields of the body alike."""
    same = {
        "model": "m",
        "max_tokens": 7,
        "min_tokens": 1,
        "n": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 2**40,
        "stop": ["x", "yy"],
        "stop_token_ids": [120, 121],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "priority": -3,
        "cache_salt": "tenant",
    }
    return same | more


@pytest.mark.parametrize("kind", ["prompt", "prompt_token_ids", "chat"])
async def test_every_field_asks_for_what_it_asks_for_over_http(kind: str) -> None:
    stage = Stage(say("hi"))
    request = pb.GenerateRequest(**fields(logprobs=2), logit_bias={120: -1.5}, regex="h.")
    body = fields(logit_bias={"120": -1.5}, guided_regex="h.")
    if kind == "prompt":
        request.prompt = "abc"
        body |= {"prompt": "abc", "logprobs": 2}
    elif kind == "prompt_token_ids":
        request.prompt_token_ids.ids.extend([97, 98, 99])
        body |= {"prompt": [97, 98, 99], "logprobs": 2}
    else:
        request.chat.messages.add(role="system", content="be kind")
        request.chat.messages.add(role="user", content="hello")
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = await stage.post(CHAT if kind == "chat" else COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    async with rpc_served(stage) as stub:
        await stub.GenerateWhole(request)
        await streamed(stub.Generate(request))
    over_http, *over_rpc = [_job(asked) for asked in stage.client.asked]
    assert over_rpc == [over_http, over_http]


def _job(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in ("request_id", "arrival")}


@pytest.mark.parametrize("kind", ["prompt", "chat"])
async def test_streamed_equals_whole(kind: str) -> None:
    """Half characters, several choices, log-probabilities, token ids and usage included."""
    request = pb.GenerateRequest(n=3, logprobs=2, return_token_ids=True, max_tokens=50)
    request.chat.CopyFrom(HELLO.chat) if kind == "chat" else setattr(request, "prompt", "abc")
    async with rpc_served(Stage(say("héllo ✓!", pause_s=0.002))) as stub:
        whole = await stub.GenerateWhole(request)
        messages = await streamed(stub.Generate(request))
    assert len(messages) > 3
    assert unnamed(joined(messages)) == unnamed(whole)
    raw = "héllo ✓!".encode()
    assert [choice.text for choice in whole.choices] == ["héllo ✓!"] * 3
    assert [list(choice.token_ids) for choice in whole.choices] == [list(raw)] * 3
    assert [len(choice.logprobs) for choice in whole.choices] == [len(raw)] * 3
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    assert whole.usage.completion_tokens == 3 * len(raw)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    first = whole.choices[0].logprobs[0]
    assert (first.token, first.logprob) == ("h", -0.5)
    assert [(one.token, one.logprob) for one in first.top] == [("h", -0.5), ("i", -1.5)]
    assert first.token_bytes == (b"h" if kind == "chat" else b"")


async def test_token_ids_are_sent_only_if_asked_for() -> None:
    async with rpc_served(Stage(say("hé"))) as stub:
        whole = await stub.GenerateWhole(HELLO)
        messages = await streamed(stub.Generate(HELLO))
    assert [list(choice.token_ids) for choice in whole.choices] == [[]]
    assert unnamed(joined(messages)) == unnamed(whole)


async def test_token_ids_over_http_are_those_of_the_stream() -> None:
    stage = Stage(say("é!"))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "return_token_ids": True}
    whole = (await stage.post(CHAT, body)).json()["choices"][0]["token_ids"]
    text = (await stage.post(CHAT, {**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    told = [event["choices"][0].get("token_ids", []) for event in events]
    assert [token for ids in told for token in ids] == whole == list("é!".encode())


async def test_an_answer_larger_than_the_buffers_arrives_whole() -> None:
    async with rpc_served(Stage(flood(200, 4000))) as stub:
        answer = joined(await streamed(stub.Generate(hello(max_tokens=190))))
    assert answer.choices[0].text == "x" * 800_000


async def test_the_request_id_comes_back_and_a_given_one_is_kept() -> None:
    async with rpc_served(Stage(say("hi"))) as stub:
        call = stub.Generate(HELLO, metadata=(("x-request-id", "mine-1"),))
        told = dict(await call.initial_metadata())
        assert told["x-request-id"] == "mine-1"
        assert joined(await streamed(call)).id == "chatcmpl-mine-1"


def test_tools_and_their_results_become_the_chat_api_s() -> None:
    call = pb.ToolCall(id="c1", name="weather", arguments='{"city":"Bern"}')
    chat = pb.Chat(
        messages=[
            pb.Message(role="user", content="?"),
            pb.Message(role="assistant", tool_calls=[call], reasoning_content="hm"),
            pb.Message(role="tool", tool_call_id="c1", content="12"),
        ],
        tools=[pb.Tool(name="weather", description="of a city", parameters=json.dumps(SCHEMA), strict=True)],
        tool_choice=pb.ToolChoice(function="weather"),
        parallel_tool_calls=False,
        reasoning_effort="low",
        thinking_token_budget=9,
    )
    asked = bodies.generate(pb.GenerateRequest(chat=chat), stream=False)
    function = {"name": "weather", "arguments": '{"city":"Bern"}'}
    tool = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
    assert asked.path == CHAT
    assert msgspec.json.decode(asked.body) == {
        "messages": [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "thinking_token_budget": 9,
    }


@pytest.mark.parametrize("kind", ["prompt", "chat"])
@pytest.mark.parametrize("structure", ["json_schema", "json_object", "regex", "choice", "grammar"])
async def test_a_structure_is_what_the_engine_is_asked_for(kind: str, structure: str) -> None:
    stage = Stage(say('{"a":1}'))
    value: Any = {
        "json_schema": json.dumps(SCHEMA),
        "json_object": True,
        "regex": r"\{.*\}",
        "choice": pb.Choices(texts=['{"a":1}', "no"]),
        "grammar": "start: /.+/",
    }[structure]
    request = pb.GenerateRequest(**{structure: value})
    request.chat.CopyFrom(HELLO.chat) if kind == "chat" else setattr(request, "prompt", "abc")
    async with rpc_served(stage) as stub:
        answer = await stub.GenerateWhole(request)
    assert answer.choices[0].text == '{"a":1}'
    grammar = stage.client.asked[0]["params"].grammar
    told = {"json_schema": "integer", "json_object": "", "regex": r"\{.*\}", "choice": "no"}
    assert told.get(structure, "/.+/") in grammar.source
    assert structure != "json_object" or grammar.kind == "json_object"
