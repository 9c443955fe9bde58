"""/v1/completions over a scripted engine: prompts of every kind, echo, the older logprobs shape."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.server.events import chunks, joined_completion
from tests.server.scripted_client import BEGIN, say
from tests.server.stage import COMPLETIONS, Stage

OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"prompt": ["ab", "cd"], "n": 2},
    {"prompt": [[104, 105], [66]], "echo": True},
    {"logprobs": 2},
    {"logprobs": 0, "n": 2},
    {"echo": True},
    {"echo": True, "logprobs": 1, "n": 2},
    {"prompt_logprobs": 2},
    {"prompt": ["é", "b"], "prompt_logprobs": 2, "echo": True, "logprobs": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_streamed_equals_whole(options: dict[str, Any]) -> None:
    stage = Stage(say("né€!"))
    body = {"prompt": "hü", **options}
    whole = (await stage.post(COMPLETIONS, body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks((await stage.post(COMPLETIONS, {**body, **options})).text)
    assert joined_completion(streamed[:-1]) == joined_completion([whole])
    assert streamed[-1]["usage"] == whole["usage"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))


async def test_one_choice_per_prompt_and_sample_in_order() -> None:
    async def echo(prompt: list[int], params: Any) -> Any:
        text = bytes(prompt[1:]).decode()
        async for chunk in say(text)(prompt, params):
            yield chunk

    stage = Stage(echo)
    answer = (await stage.post(COMPLETIONS, {"prompt": ["one", "two"], "n": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[BEGIN, 104, 105]]),
        (["hi", "a"], [[BEGIN, 104, 105], [BEGIN, 97]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105]], [[104], [105]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_a_prompt_may_be_text_or_ids_or_a_list_of_either(
    stage: Stage, prompt: Any, ids: list[list[int]]
) -> None:
    assert (await stage.post(COMPLETIONS, {"prompt": prompt})).status_code == 200
    assert [asked["prompt"] for asked in stage.client.asked] == ids


async def test_a_long_list_of_ids_is_one_prompt_not_too_many(stage: Stage) -> None:
    stage.client.hello = msgspec.structs.replace(stage.client.hello, max_context=10_000)
    assert (await stage.post(COMPLETIONS, {"prompt": [1] * 2000})).status_code == 200
    assert len(stage.client.asked) == 1


async def test_sixteen_tokens_is_the_default_here(stage: Stage) -> None:
    await stage.post(COMPLETIONS, {"prompt": "a"})
    assert stage.client.asked[0]["params"].max_tokens == 16


async def test_logprobs_have_the_older_shape_with_offsets_into_the_text(stage: Stage) -> None:
    answer = (await stage.post(COMPLETIONS, {"prompt": "a", "logprobs": 1})).json()
    choice = answer["choices"][0]
    assert choice["text"] == "hé!"
    assert choice["logprobs"] == {
        "tokens": ["h", "\\xc3", "\\xa9", "!"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [{"h": -0.5}, {"\\xc3": -0.5}, {"\\xa9": -0.5}, {"!": -0.5}],
        "text_offset": [0, 1, 1, 2],  # both halves of é begin where é begins
    }


async def test_an_echo_has_the_prompt_and_its_logprobs_but_for_the_first_token(stage: Stage) -> None:
    answer = (await stage.post(COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 0})).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abhé!"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "h", "\\xc3", "\\xa9", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 6
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 4]
    assert answer["usage"]["completion_tokens"] == 4


async def test_an_echo_of_ids_is_their_text_without_special_tokens(stage: Stage) -> None:
    answer = (await stage.post(COMPLETIONS, {"prompt": [BEGIN, 104, 105], "echo": True})).json()
    assert answer["choices"][0]["text"] == "hihé!"


async def test_prompt_logprobs_have_one_entry_per_prompt_token(stage: Stage) -> None:
    answer = (await stage.post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 2})).json()
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]


async def test_a_probability_of_zero_is_written_as_a_number(stage: Stage) -> None:
    from tests.server import scripted_client

    async def impossible(prompt: list[int], params: Any) -> Any:
        known = scripted_client.TokenLogprob(104, float("-inf"), 9)
        yield scripted_client.OutputChunk(0, "h", [104], [known])
        yield scripted_client.last_chunk(0, prompt, 1)

    stage.client.script = impossible
    answer = (await stage.post(COMPLETIONS, {"prompt": "a", "logprobs": 0})).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
