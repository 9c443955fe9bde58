"""What the official SDK makes of answers that a healthy server with the real model does not give."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.server.config import ServerConfig
from tests.server.scripted_client import fail
from tests.server.stage import HELLO, Stage


def sdk(http: httpx.AsyncClient, key: str = "k") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0)


async def read_all(client: AsyncOpenAI) -> str:
    stream: Any = await client.chat.completions.create(**HELLO, stream=True)
    return "".join([part.choices[0].delta.content or "" async for part in stream])


async def test_a_wrong_key_is_an_authentication_error() -> None:
    stage = Stage(config=ServerConfig(api_keys=("right",)))
    async with stage.served() as http:
        async with sdk(http, "wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await read_all(client)
        assert caught.value.code == "invalid_api_key"
        async with sdk(http, "right") as client:
            assert await read_all(client) == "hé!"


async def test_a_full_queue_is_a_rate_limit_error_that_says_when_to_come_back() -> None:
    stage = Stage(fail(QueueFull(512, 0.5)))
    async with stage.served() as http, sdk(http) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await read_all(client)
        assert caught.value.response.headers["retry-after"] == "1"


async def test_an_engine_that_dies_in_the_middle_is_an_api_error_not_an_end() -> None:
    stage = Stage(fail(EngineDied("the engine process ended unexpectedly"), after="half"))
    async with stage.served() as http, sdk(http) as client:
        with pytest.raises(openai.APIError, match="ended unexpectedly"):
            await read_all(client)
