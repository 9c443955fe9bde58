"""A request with more choices than run together is handed to the engine in parts, and answered as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import QueueFull
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.server.answering import submission
from ridgeline.server.answering.submission import parts_of
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S
from tests.server.events import chunks
from tests.server.scripted_client import last_chunk, say
from tests.server.stage import COMPLETIONS, Stage

TOGETHER = 8  # what the scripted engine computes at once


class Counting:
    """Says the prompt and the sample; knows the most choices that were under way at once."""

    def __init__(self, full: tuple[int, ...] = ()) -> None:
        self.under_way = self.most = self.asked = 0
        self._full = full  # of the requests in order, those that find the queue full

    async def __call__(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        number, self.asked = self.asked, self.asked + 1
        if number in self._full:
            raise QueueFull(512, 1.0)
        self.under_way += params.n
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        text = "".join(chr(token) for token in prompt if token < 128)
        for index in range(params.n):
            yield OutputChunk(index, f"{text}.{params.seed}.{index}", [65])
        self.under_way -= params.n
        for index in range(params.n):
            yield last_chunk(index, prompt, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_1024_prompts_are_answered_in_order_without_filling_the_queue(stream: bool) -> None:
    script = Counting()
    body = {"prompt": [str(number) for number in range(1024)], "stream": stream, "seed": 7}
    answer = await Stage(script).post(COMPLETIONS, body)
    texts = [""] * 1024
    for event in chunks(answer.text) if stream else [answer.json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [f"{number}.7.0" for number in range(1024)]
    assert TOGETHER <= script.most <= 2 * TOGETHER


async def test_more_samples_than_run_together_are_those_of_one_request() -> None:
    script = Counting()
    answer = await Stage(script).post(COMPLETIONS, {"prompt": ["a", "b"], "n": 20, "seed": 7})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(40))
    texts = [choice["text"] for choice in choices[:20]]
    assert texts[:8] == [f"a.7.{index}" for index in range(8)]
    assert len(set(texts)) == 20
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert script.most <= 2 * TOGETHER


async def test_a_full_queue_refuses_the_whole_request_or_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submission, "RETRY_S", 0.01)
    body = {"prompt": [str(number) for number in range(50)], "seed": 7}
    refused = await Stage(Counting(full=(0,))).post(COMPLETIONS, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    waited = await Stage(Counting(full=(3, 4, 20))).post(COMPLETIONS, body)
    assert [choice["text"] for choice in waited.json()["choices"]] == [
        f"{number}.7.0" for number in range(50)
    ]


async def test_a_client_that_leaves_stops_the_parts_that_have_not_begun() -> None:
    stage = Stage(say("a long answer", pause_s=0.05))
    async with stage.served() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                COMPLETIONS, json={"prompt": ["x"] * 100}, timeout=httpx.Timeout(PATIENCE_S, read=0.3)
            )
        await asyncio.sleep(1.0)
        assert len(stage.client.asked) < 100


def test_each_sample_has_one_part_and_its_own_seed() -> None:
    parts = parts_of(3, SamplingParams(n=128, seed=5), 64)
    owned = [(part.prompt, part.first + index) for part in parts for index in range(part.params.n)]
    assert sorted(owned) == [(number, index) for number in range(3) for index in range(128)]
    assert len(parts_of(1024, SamplingParams(n=1), 64)) == 1024


def test_the_documented_limits_are_reached_on_a_real_server(live_server: LiveServer) -> None:
    def post(**body: Any) -> httpx.Response:
        asked = {"max_tokens": 1, "temperature": 1.0, "seed": 3, **body}
        return httpx.post(live_server.base_url + COMPLETIONS, json=asked, timeout=2 * PATIENCE_S)

    many = post(prompt=[[number % 1000] for number in range(1024)])
    assert (many.status_code, len(many.json()["choices"])) == (200, 1024), many.text
    samples = post(prompt="Once", n=128)
    assert (samples.status_code, len(samples.json()["choices"])) == (200, 128), samples.text
    half = post(prompt="Once", n=64)
    texts = [choice["text"] for choice in samples.json()["choices"]]
    assert texts[:64] == [choice["text"] for choice in half.json()["choices"]]
    assert post(prompt="Once", n=129).status_code == 400
    assert post(prompt=["a"] * 1025).status_code == 400
