"""Exceptions become answers: one table, OpenAI's shape, and nothing that happens to one request lasts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from ridgeline.engine.errors import EngineDied, InvalidRequest, QueueFull, RequestFailed
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.server.config import ServerConfig
from tests.server.scripted_client import fail, hang, say
from tests.server.stage import CHAT, HELLO, Stage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry_after"),
    [
        (InvalidRequest("n", "is too much"), 400, None, "n", None),
        (QueueFull(512, 2.2), 429, "queue_full", None, "3"),
        (RequestFailed("sampling failed"), 500, "request_failed", None, None),
        (EngineDied("the engine process ended unexpectedly"), 503, "engine_died", None, "2"),
    ],
    ids=["invalid", "full", "failed", "died"],
)
async def test_an_engine_error_before_the_first_token_has_its_own_status(
    error: Exception, status: int, code: str, param: str, retry_after: str, stream: bool
) -> None:
    stage = Stage(fail(error))
    response = await stage.post(CHAT, {**HELLO, "stream": stream})
    told = response.json()["error"]
    assert (response.status_code, told["code"], told["param"]) == (status, code, param)
    assert str(error) == told["message"]
    assert response.headers.get("retry-after") == retry_after


async def test_an_engine_that_dies_in_the_middle_of_a_whole_answer_gives_503_and_no_text() -> None:
    stage = Stage(fail(EngineDied("gone"), after="half an answ"))
    response = await stage.post(CHAT, HELLO)
    assert response.status_code == 503
    assert "half" not in response.text


async def test_a_bug_is_500_with_the_request_id_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)
    stage = Stage(fail(ZeroDivisionError("secret inner workings")))
    response = await stage.post(CHAT, HELLO, headers={"x-request-id": "find-me"})
    assert response.status_code == 500
    assert "find-me" in response.json()["error"]["message"]
    assert "secret" not in response.text
    logged = next(record for record in caplog.records if record.exc_info)
    assert logged.request_id == "find-me"
    assert logged.exc_info[0] is ZeroDivisionError

    stage.client.script = say("still here")
    assert (await stage.post(CHAT, HELLO)).json()["choices"][0]["message"]["content"] == "still here"


async def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(stage: Stage) -> None:
    async with stage.http() as http:
        missing = await http.get("/v1/nothing")
        wrong = await http.get(CHAT)
        slash = await http.post(CHAT + "/", json=HELLO)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert slash.status_code == 404


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_an_engine_that_is_not_ready_is_503_with_the_reason(path: str) -> None:
    stage = Stage()
    stage.supervisor.client = None
    stage.supervisor.reason = "the engine is being started"
    body = HELLO if path == CHAT else {"prompt": "a"}
    response = await stage.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "not_ready")
    assert error["message"] == "the engine is being started"
    assert int(response.headers["retry-after"]) >= 1


async def test_a_draining_server_takes_nothing_new(stage: Stage) -> None:
    stage.supervisor.draining = True
    response = await stage.post(CHAT, HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert int(response.headers["retry-after"]) >= 1
    assert stage.client.asked == []


async def test_an_answer_that_takes_too_long_is_504_and_aborted() -> None:
    stage = Stage(hang(after="so far"), ServerConfig(request_timeout_s=0.5))
    response = await stage.post(CHAT, HELLO)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert len(stage.client.aborted) == 1


async def test_a_background_priority_has_no_deadline_and_stays_out_of_the_latencies() -> None:
    stage = Stage(say("slow", pause_s=0.1), ServerConfig(request_timeout_s=0.3))
    response = await stage.post(CHAT, {**HELLO, "priority": BACKGROUND_PRIORITY})
    assert response.status_code == 200
    latencies = 'e2e_request_latency_seconds_count{model_name="m"}'
    assert f"{latencies} 0.0" in stage.metrics_text()
    stage.client.script = hang()
    response = await stage.post(CHAT, {**HELLO, "priority": BACKGROUND_PRIORITY - 1})
    assert response.status_code == 504
    assert f"{latencies} 1.0" in stage.metrics_text()


async def test_a_background_embedding_has_no_deadline() -> None:
    stage = Stage(config=ServerConfig(request_timeout_s=0.01))
    stage.client.hello = msgspec.structs.replace(stage.client.hello, task="embed", vector_size=2)

    async def embed(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.1)
        return np.zeros((1, 2), np.float32)

    stage.client.embed = embed  # type: ignore[attr-defined]
    for priority, status in ((BACKGROUND_PRIORITY, 200), (BACKGROUND_PRIORITY - 1, 504)):
        body = {"input": [1, 2], "priority": priority}
        assert (await stage.post("/v1/embeddings", body)).status_code == status


async def test_refusals_are_counted_by_reason_and_status(stage: Stage) -> None:
    await stage.post(CHAT, {"temperature": 1})
    stage.client.script = fail(QueueFull(512, 1.0))
    await stage.post(CHAT, HELLO)
    refused = [line for line in stage.metrics_text().splitlines() if "request_refused_total{" in line]
    assert any('reason="missing_field",status="400"' in line and line.endswith(" 1.0") for line in refused)
    assert any('reason="queue_full",status="429"' in line and line.endswith(" 1.0") for line in refused)
    assert "request_success_total{" not in stage.metrics_text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_fails_before_its_first_byte_is_counted_once(stream: bool) -> None:
    stage = Stage(fail(EngineDied("gone")))
    assert (await stage.post(CHAT, {**HELLO, "stream": stream})).status_code == 503
    assert 'finished_reason="error"' in stage.metrics_text()
    assert "request_refused_total{" not in stage.metrics_text()
