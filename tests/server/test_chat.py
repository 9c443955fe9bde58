"""/v1/chat/completions over a scripted engine: the shapes, and that streamed = whole for every option."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.server.events import chunks, joined_chat, whole_chat
from tests.server.scripted_client import END, say
from tests.server.stage import CHAT, HELLO, Stage

OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0, "n": 2, "logprobs": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_streamed_equals_whole(options: dict[str, Any]) -> None:
    stage = Stage(say("Grüße 🎉 €"))
    whole = (await stage.post(CHAT, {**HELLO, **options})).json()
    streamed = chunks(
        (
            await stage.post(
                CHAT, {**HELLO, **options, "stream": True, "stream_options": {"include_usage": True}}
            )
        ).text
    )
    assert joined_chat(streamed[:-1]) == whole_chat(whole)
    assert streamed[-1]["usage"] == whole["usage"]
    told = [part["prompt_logprobs"] for part in streamed if "prompt_logprobs" in part]
    assert told == ([whole["prompt_logprobs"]] if "prompt_logprobs" in options else [])


async def test_a_whole_answer_has_openai_shape(stage: Stage) -> None:
    answer = (await stage.post(CHAT, HELLO)).json()
    prompt_tokens = len("<user: hello\nassistant: ")  # one token for the beginning, then bytes
    assert answer == {
        "id": answer["id"],
        "object": "chat.completion",
        "created": answer["created"],
        "model": "m",
        "system_fingerprint": answer["system_fingerprint"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": END,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_a_stream_opens_every_choice_with_the_role_and_ends_with_done(stage: Stage) -> None:
    parts = chunks((await stage.post(CHAT, {**HELLO, "stream": True, "n": 2})).text)
    for index in range(2):
        first = next(part for part in parts if part["choices"][0]["index"] == index)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(part["object"] == "chat.completion.chunk" for part in parts)
    assert len({part["id"] for part in parts}) == 1
    assert not any("usage" in part for part in parts)


async def test_half_a_character_is_not_sent_as_an_event(stage: Stage) -> None:
    parts = chunks((await stage.post(CHAT, {**HELLO, "stream": True})).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {"content": "!"},
        {},
    ]


async def test_include_usage_adds_a_last_chunk_and_null_to_the_others(stage: Stage) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    parts = chunks((await stage.post(CHAT, body)).text)
    assert all(part["usage"] is None for part in parts[:-1])
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 4


async def test_logprobs_name_half_characters_by_their_bytes(stage: Stage) -> None:
    answer = (await stage.post(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 1})).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "\\xc3", "\\xa9", "!"]
    assert [entry["bytes"] for entry in content] == [[0x68], [0xC3], [0xA9], [0x21]]
    assert content[0]["top_logprobs"] == [{"token": "h", "logprob": -0.5, "bytes": [0x68]}]


async def test_timing_is_told_only_if_asked(stage: Stage) -> None:
    assert "timing" not in (await stage.post(CHAT, HELLO)).json()["usage"]
    usage = (await stage.post(CHAT, {**HELLO, "include_timing": True, "n": 2})).json()["usage"]
    assert [record["index"] for record in usage["timing"]] == [0, 1]
    assert usage["timing"][0]["ttft_ms"] >= 0


async def test_options_reach_the_engine_under_its_own_names(stage: Stage) -> None:
    body = {
        **HELLO,
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.1,
        "stop": "END",
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "logit_bias": {"3": -100},
        "seed": -1,
        "ignore_eos": True,
        "min_tokens": 2,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "priority": -3,
        "cache_salt": "tenant",
    }
    assert (await stage.post(CHAT, body)).status_code == 200
    asked = stage.client.asked[0]
    params = asked["params"]
    assert (asked["priority"], asked["cache_namespace"]) == (-3, "tenant")
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0, 0, 0.5)
    assert (params.stop, params.stop_token_ids, params.include_stop) == (("END",), (5,), True)
    assert (params.logit_bias, params.seed, params.ignore_eos, params.min_tokens) == ({3: -100}, -1, True, 2)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


async def test_messages_are_rendered_with_parts_joined_and_developer_as_system(stage: Stage) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await stage.post(CHAT, {"messages": messages, "add_generation_prompt": False})
    prompt = stage.client.tokenizer.decode(stage.client.asked[0]["prompt"])
    assert prompt == "system: be brief\nuser: a\nb\n"


async def test_an_answer_of_the_sdk_may_be_sent_back_as_it_is(stage: Stage) -> None:
    answer = ChatCompletion.model_validate((await stage.post(CHAT, HELLO)).json())
    message = answer.choices[0].message.model_dump()
    messages = [*HELLO["messages"], message, {"role": "user", "content": "go on"}]
    assert (await stage.post(CHAT, {"messages": messages})).status_code == 200
    assert "assistant: hé!" in stage.client.tokenizer.decode(stage.client.asked[1]["prompt"])


async def test_the_model_may_be_left_out_or_called_by_any_served_name(stage: Stage) -> None:
    for asked, answered in ((None, "m"), ("m", "m"), ("alias", "alias")):
        response = await stage.post(CHAT, {**HELLO, "model": asked})
        assert response.json()["model"] == answered


async def test_a_finished_request_is_counted_once_per_choice(stage: Stage) -> None:
    await stage.post(CHAT, {**HELLO, "n": 2})
    counted = [line for line in stage.metrics_text().splitlines() if "request_success_total{" in line]
    assert len(counted) == 1
    assert f'endpoint="{CHAT}"' in counted[0]
    assert counted[0].endswith(" 2.0")
