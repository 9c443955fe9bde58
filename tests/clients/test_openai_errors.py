"""The official openai SDK: models, what is refused as which exception, timeouts, and leaving early."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import openai
import pytest

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, MODEL, Target
from tests.clients.either import each, settled
from tests.clients.openai_clients import CLIENTS, client_of
from tests.clients.questions import QUESTION
from tests.patience import PATIENCE_S

__all__ = ["CLIENTS", "client_of"]  # read by conftest
LONG: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "extra_body": {"ignore_eos": True}}


@case("models")
async def test_both_models_are_listed_and_shown(client: Any) -> None:
    listed = [model.id async for model in each(await settled(client.models.list()))]
    assert {MODEL, EMBEDDER} <= set(listed)
    shown = await settled(client.models.retrieve(MODEL))
    assert (shown.id, shown.object) == (MODEL, "model")


@case("error: unknown model", "whole", "streamed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_unknown_model_is_not_found(client: Any, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await settled(client.chat.completions.create(model="gpt-9", messages=QUESTION, stream=stream))
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@case("error: bad field", "whole", "streamed")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_bad_field_is_a_bad_request_that_names_it(client: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await settled(
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1, stream=stream)
        )
    assert caught.value.param == "temperature"
    assert caught.value.request_id


@case("error: wrong key")
async def test_a_wrong_key_is_an_authentication_error(client_name: str, target: Target) -> None:
    stranger: Any = client_of(client_name, target, api_key="sk-of-somebody-else")
    with pytest.raises(openai.AuthenticationError):
        await settled(stranger.models.list())
    await settled(stranger.close())


@case("timeout")
async def test_a_client_that_waits_no_longer_gives_up_and_frees_the_engine(
    client: Any, target: Target
) -> None:
    with pytest.raises(openai.APITimeoutError):
        await settled(client.with_options(timeout=0.5).chat.completions.create(**LONG, max_tokens=4000))
    await assert_idle(target)


@case("leaving a stream", "streamed")
async def test_a_client_that_leaves_its_stream_frees_the_engine(client: Any, target: Target) -> None:
    stream = await settled(client.chat.completions.create(**LONG, max_tokens=4000, stream=True))
    async for _ in each(stream):
        break
    await settled(stream.close())
    await assert_idle(target)


async def assert_idle(target: Target) -> None:
    """Nothing runs any more, soon."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        text = httpx.get(f"{target.root}/metrics", timeout=PATIENCE_S).text
        running = re.findall(r"^ridgeline:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
        assert running, text
        if not any(float(figure) for figure in running):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the request still runs although its client left")
