"""Usage in every chunk (`continuous_usage_stats`): of a stream that breaks off, what it used is known."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest

from tests.server.events import chunks, events
from tests.server.messages import HERMES, call
from tests.server.scripted_client import fail, say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

BODIES: dict[str, dict[str, Any]] = {CHAT: HELLO, COMPLETIONS: {"model": "m", "prompt": "hello"}}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
async def test_every_chunk_tells_the_usage_so_far_and_the_last_all_of_it(path: str, n: int) -> None:
    stage = Stage(say("hé!"))
    body = {**BODIES[path], "n": n, "stream": True}
    told = chunks((await stage.post(path, {**body, "stream_options": RUNNING})).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts)
    assert counts[-1] == 4 * n
    assert told[0]["usage"]["prompt_tokens"] == told[-1]["usage"]["prompt_tokens"] > 0
    assert told[-1]["choices"] == []
    usual = chunks((await stage.post(path, {**body, "stream_options": {"include_usage": True}})).text)
    assert [chunk["choices"] for chunk in told] == [chunk["choices"] for chunk in usual]
    assert all(chunk["usage"] is None for chunk in usual[:-1])
    assert usual[-1]["usage"] == told[-1]["usage"]


async def test_calls_and_reasoning_tell_it_too() -> None:
    stage = Stage(say("<think>hm</think>" + call('{"a": 1}')), template=HERMES)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {**HELLO, "tools": tools, "stream": True, "stream_options": RUNNING}
    told = chunks((await stage.post(CHAT, body)).text)
    assert all(chunk["usage"]["completion_tokens"] > 0 for chunk in told)
    assert told[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm")


async def test_a_stream_that_breaks_off_has_told_what_it_used() -> None:
    stage = Stage(fail(RuntimeError("bug"), after="half"))
    async with stage.served() as http:
        body = {**HELLO, "stream": True, "stream_options": RUNNING}
        text = ""
        async with http.stream("POST", CHAT, json=body) as answer:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for piece in answer.aiter_text():
                    text += piece
    found = [event for event in events(text) if isinstance(event, dict) and "choices" in event]
    assert found[-1]["usage"]["completion_tokens"] == len("half")


async def test_it_needs_the_usage_to_be_asked_for() -> None:
    body = {**HELLO, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = await Stage().post(CHAT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"
