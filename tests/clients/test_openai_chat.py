"""The official openai SDK, blocking and asynchronous: chats and completions, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.cases import case
from tests.clients.conftest import MODEL, THINKER
from tests.clients.either import parts_of, settled
from tests.clients.openai_clients import CLIENTS, client_of, joined
from tests.clients.questions import QUESTION, STOP, SYSTEM, TURNS, WHO

__all__ = ["CLIENTS", "client_of"]  # read by conftest
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
async def test_a_streamed_chat_equals_a_whole_one(client: Any) -> None:
    whole = await settled(client.chat.completions.create(**GREEDY, messages=QUESTION))
    parts = await parts_of(client.chat.completions.create(**GREEDY, messages=QUESTION, **USAGE))
    [streamed] = joined(parts)
    [choice] = whole.choices
    assert choice.message.role == streamed.role == "assistant"
    assert choice.message.content
    assert (streamed.content, streamed.finish_reason) == (choice.message.content, choice.finish_reason)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert parts[-1].usage.model_dump(include=counts) == whole.usage.model_dump(include=counts)
    assert all(part.usage is None for part in parts[:-1])


@case("several turns", "whole", "streamed")
async def test_several_turns_are_one_conversation(client: Any) -> None:
    whole = await settled(client.chat.completions.create(**GREEDY, messages=TURNS))
    alone = await settled(client.chat.completions.create(**GREEDY, messages=TURNS[-1:]))
    assert whole.usage.prompt_tokens > alone.usage.prompt_tokens
    assert whole.choices[0].message.content != alone.choices[0].message.content
    [streamed] = joined(await parts_of(client.chat.completions.create(**GREEDY, messages=TURNS, stream=True)))
    assert streamed.content == whole.choices[0].message.content


@case("system prompt", "whole", "streamed")
@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_system_prompt_changes_the_answer(client: Any, role: str) -> None:
    messages: list[Any] = [{"role": role, "content": SYSTEM}, *WHO]
    plain = await settled(client.chat.completions.create(**GREEDY, messages=WHO))
    whole = await settled(client.chat.completions.create(**GREEDY, messages=messages))
    assert whole.choices[0].message.content != plain.choices[0].message.content
    [streamed] = joined(
        await parts_of(client.chat.completions.create(**GREEDY, messages=messages, stream=True))
    )
    assert streamed.content == whole.choices[0].message.content


@case("stop", "whole", "streamed")
async def test_the_text_ends_before_a_stop_string(client: Any) -> None:
    plain = await settled(client.chat.completions.create(**GREEDY, messages=QUESTION))
    whole = await settled(client.chat.completions.create(**GREEDY, messages=QUESTION, stop=[STOP]))
    call = client.chat.completions.create(**GREEDY, messages=QUESTION, stop=STOP, stream=True)
    [streamed] = joined(await parts_of(call))
    text = plain.choices[0].message.content
    assert whole.choices[0].message.content == streamed.content == text[: text.index(STOP)]
    assert whole.choices[0].finish_reason == streamed.finish_reason == "stop"


@case("n", "whole", "streamed")
@case("seed", "whole", "streamed")
async def test_a_seed_gives_the_same_three_samples_again(client: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 1, "seed": 3, "n": 3}
    whole = await settled(client.chat.completions.create(**options, max_tokens=6))
    streamed = joined(await parts_of(client.chat.completions.create(**options, max_tokens=6, stream=True)))
    other = await settled(client.chat.completions.create(**{**options, "seed": 4}, max_tokens=6))
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert [choice.content for choice in streamed] == texts
    assert [choice.message.content for choice in other.choices] != texts


@case("logprobs", "whole", "streamed")
async def test_logprobs_are_of_the_tokens_of_the_text(client: Any) -> None:
    options: dict[str, Any] = {
        **GREEDY,
        "messages": QUESTION,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 4,
    }
    whole = await settled(client.chat.completions.create(**options))
    [choice] = whole.choices
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    [streamed] = joined(await parts_of(client.chat.completions.create(**options, stream=True)))
    assert [entry.token for entry in streamed.logprobs] == [entry.token for entry in choice.logprobs.content]


@case("reasoning", "whole", "streamed")
async def test_a_model_that_does_not_reason_has_no_reasoning_content(client: Any) -> None:
    whole = await settled(client.chat.completions.create(**GREEDY, messages=QUESTION))
    assert "reasoning_content" not in whole.choices[0].message.model_dump(exclude_none=True)
    parts = await parts_of(client.chat.completions.create(**GREEDY, messages=QUESTION, stream=True))
    deltas = [choice.delta.model_dump(exclude_none=True) for part in parts for choice in part.choices]
    assert all("reasoning_content" not in delta for delta in deltas)


@case("reasoning", "whole", "streamed")
async def test_what_a_model_thinks_comes_beside_what_it_answers(client: Any) -> None:
    budget = {"thinking_token_budget": 8, "guided_choice": ["yes", "no"]}
    options: dict[str, Any] = {"model": THINKER, "messages": QUESTION, "temperature": 0, "extra_body": budget}
    whole = await settled(client.chat.completions.create(**options))
    message = whole.choices[0].message
    assert message.content in ("yes", "no")
    assert message.reasoning_content
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8
    parts = await parts_of(client.chat.completions.create(**options, stream=True))
    deltas = [choice.delta.model_dump() for part in parts for choice in part.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message.reasoning_content
    assert joined(parts)[0].content == message.content


@case("completions", "whole", "streamed")
async def test_a_streamed_completion_equals_a_whole_one(client: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": ["The capital of France is", "Water boils at"]}
    whole = await settled(client.completions.create(**options))
    texts = ["", ""]
    for part in await parts_of(client.completions.create(**options, stream=True)):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert all(texts)
