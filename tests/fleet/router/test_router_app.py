"""The router's own front: paths, keys, errors in each dialect, metrics, drain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ridgeline.fleet.router.app import RouterApp
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.process import control_origin
from tests.fleet.router.conftest import Stage, counted, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.served import router_process, served
from tests.fleet.router.small_http import Asked
from tests.patience import PATIENCE_S

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "count"}]}


@asynccontextmanager
async def front(stage: Stage, migrations: int = 3, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The app on a real listener, and a client of it."""
    router = await stage.router(migrations=migrations)
    async with served(RouterApp(router, RouterConfig(**options))) as client:
        yield client


async def test_answers_whole_and_streamed_models_health_and_metrics(stage: Stage) -> None:
    await stage.add()
    async with front(stage) as client:
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert (whole.status_code, whole.json()["text"]) == (200, "01234567")
        streamed = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert streamed.content == counted(8)
        assert streamed.headers["content-type"] == "text/event-stream"
        for answer in (whole, streamed):
            (date,) = [value for name, value in answer.headers.raw if name.lower() == b"date"]
            assert b"1970" not in date  # the replica's
        models = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in models] == [MODEL, "alias", "outer"]
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"status": "ready"}
        metrics = (await client.get("/metrics")).text
        assert f'ridgeline_fleet_requests_total{{model="{MODEL}",outcome="ok",router="router"}} 2' in metrics
        assert 'ridgeline_fleet_replica_up{model="counter",replica="r0"} 1' in metrics
        assert "ridgeline_fleet_output_tokens_total" in metrics


async def test_a_router_that_has_just_started_waits_for_its_table_to_name_the_models(stage: Stage) -> None:
    await stage.controller.stop()
    router = FleetRouter(control_origin(stage.controller.path))
    stage.routers.append(router)
    router.start()
    async with served(RouterApp(router, RouterConfig())) as client:
        asked = asyncio.create_task(client.get("/v1/models"))
        await asyncio.sleep(0.05)
        await stage.controller.start()
        assert [one["id"] for one in (await asked).json()["data"]] == [MODEL, "alias", "outer"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/chat/completions", b"{", 400, "not a JSON object"),
        ("/v1/chat/completions", b"{}", 400, "model: this field is required"),
        ("/v1/chat/completions", b'{"model": 3}', 400, "model:"),
        ("/v1/chat/completions", b'{"Model": "counter", "model": "counter"}', 400, "Model: write 'model'"),
        ("/v1/chat/completions", b'{"model": "none"}', 404, "no model is named 'none'"),
        ("/v1/messages", b'{"model": "none"}', 404, "no model is named 'none'"),
        ("/v1/files", b"{}", 404, "a fleet does not serve files"),
        ("/v1/nothing", b"{}", 404, "no such path"),
        ("/v1/models", b"{}", 405, "use GET"),
        ("/v1/chat/completions", b'{"model":"' + b"x" * 600 + b'"}', 413, "larger than 500 bytes"),
    ],
)
async def test_what_is_refused_names_the_reason(
    stage: Stage, path: str, body: bytes, status: int, said: str
) -> None:
    async with front(stage, max_body_bytes=500) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
        if path == "/v1/messages":
            assert answer.json()["type"] == "error"


async def test_keys_are_required_where_some_are_configured(stage: Stage) -> None:
    await stage.add()
    async with front(stage, keys=("one", "two")) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        wrong = {"authorization": "Bearer three"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=wrong)).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        for right in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=right)).status_code == 200


async def test_without_keys_a_foreign_host_name_is_refused(stage: Stage) -> None:
    async with front(stage) as client:
        answer = await client.get("/v1/models", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b'data: {"error":{"message":"the answer was interrupted'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"replica_failed"'),
        ("/api/chat", b'{"error":"the answer was interrupted'),
    ],
)
async def test_a_stream_that_cannot_continue_ends_with_an_error_in_its_dialect(
    stage: Stage, path: str, last: bytes
) -> None:
    async def breaks(asked: Asked, token: int) -> bool:
        if token == 2:
            asked.writer.transport.abort()
        return token == 2

    (first,) = await stage.add()
    first.fault = breaks
    async with front(stage, migrations=0) as client:
        answer = await client.post(path, json=CHAT | {"stream": True})
        events = answer.content.split(b'data: {"token":1}\n\n')
        assert answer.status_code == 200
        assert events[1].startswith(last), answer.content
        assert b"[DONE]" not in answer.content


async def test_a_saturated_fleet_answers_429_with_retry_after(stage: Stage) -> None:
    (first,) = await stage.add(max_running=1)
    first.gate = asyncio.Event()
    async with front(stage) as client:
        held = stage.routers[-1].held[MODEL]
        waiting = []
        while len(held) < 4:
            waiting.append(asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)))
            await asyncio.sleep(0.02)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        first.gate.set()
        answers = await asyncio.gather(*waiting)
        assert {one.status_code for one in answers} == {200}
        assert any("x-ridgeline-held-position" in one.headers for one in answers)


async def test_a_client_that_disconnects_frees_its_replica(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    async with front(stage) as client:
        book = stage.routers[-1].book
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await until(lambda: first.running and book.in_flight() == 1, "the request at the replica")
        asked.cancel()
        await until(lambda: book.in_flight() == 0, "the end of the request")


async def test_a_router_process_drains_on_sigterm(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    with router_process(stage.controller.path, RouterConfig(drain_s=PATIENCE_S)) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            await until(lambda: stage.controller.demands, "a report of the process")
            body = CHAT | {"stream": True}
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda: first.running, "the stream")
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert process.poll() is None
            first.gate.set()
            assert (await asked).content == counted(8)
        await until(lambda: process.poll() is not None, "the end of the process")
        assert process.returncode == 0
