"""A request that leaves sampling out gets the model's defaults, at every endpoint; what it says wins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.files.generation_config import SamplingDefaults
from tests.server.scripted_client import MAX_CONTEXT
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage

DEFAULTS = SamplingDefaults(0.3, 0.8, 20, 0.05, 1.1, max_tokens=50, source="generation_config.json")
ASKED: dict[str, Any] = {
    CHAT: HELLO,
    COMPLETIONS: {"prompt": "hello"},
    "/v1/responses": {"input": "hello", "store": False},
    "/v1/messages": {"model": "m", "max_tokens": 50, "messages": HELLO["messages"]},
    "/api/chat": {"stream": False, **HELLO},
    "/api/generate": {"stream": False, "model": "m", "prompt": "hello"},
}


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.client.hello = msgspec.structs.replace(stage.client.hello, sampling=DEFAULTS)
    return stage


async def params_of(stage: Stage, path: str, **fields: Any) -> SamplingParams:
    answer = await stage.post(path, {**ASKED[path], **fields})
    assert answer.status_code == 200, answer.text
    params: SamplingParams = stage.client.asked[-1]["params"]
    return params


@pytest.mark.parametrize("path", ASKED)
async def test_every_endpoint_begins_with_the_models_defaults(stage: Stage, path: str) -> None:
    params = await params_of(stage, path)
    told = (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty)
    assert told == (0.3, 0.8, 20, 0.05, 1.1)
    assert params.max_tokens == (16 if path == COMPLETIONS else 50)


@pytest.mark.parametrize("path", ASKED)
async def test_a_field_of_the_request_wins(stage: Stage, path: str) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    params = await params_of(stage, path, **({"options": fields} if path.startswith("/api/") else fields))
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


async def test_null_means_the_default(stage: Stage) -> None:
    assert (await params_of(stage, CHAT, temperature=None)).temperature == 0.3


async def test_a_default_length_gives_way_to_the_requests_and_to_the_context(stage: Stage) -> None:
    assert (await params_of(stage, CHAT, max_tokens=7)).max_tokens == 7
    assert (await params_of(stage, CHAT, max_completion_tokens=8)).max_tokens == 8
    assert (await params_of(stage, CHAT, min_tokens=60)).max_tokens == 60
    long = "x" * (MAX_CONTEXT - 40)
    await params_of(stage, CHAT, messages=[{"role": "user", "content": long}])


async def test_a_response_object_shows_what_was_sampled_with(stage: Stage) -> None:
    body = (await stage.post("/v1/responses", ASKED["/v1/responses"])).json()
    assert (body["temperature"], body["top_p"]) == (0.3, 0.8)
