"""Chat of the console on the admin port: the public API answers, by the client's key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ridgeline.gateway.admin import chat
from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.chat import ChatForwarding, own_origin
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys, key_file
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.store import Store
from tests.console.threaded_stage import listening
from tests.patience import PATIENCE_S

SECRET = {"authorization": "Bearer a-client's-key"}


class Public:
    """In place of the gateway's public port."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.is_left = asyncio.Event()
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        self.seen.append(dict(request.headers))
        if "authorization" not in request.headers:
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"data": [{"id": "fast"}]}, headers={"x-request-id": "req_1"})

    async def chat(self, request: Request) -> Response:
        self.seen.append(dict(request.headers))
        self.bodies.append(await request.body())

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"data: one\n\n"
                await self.go_on.wait()
                yield b"data: two\n\n"
            finally:
                self.is_left.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")


@asynccontextmanager
async def admin(folder: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    store, config = Store(StoreConfig(), folder), AdminConfig(wrong_key_delay_s=0.0)
    forwarding = ChatForwarding(own_origin("127.0.0.1", port, False))
    keys = AdminKeys(key_file(config, folder))
    app = admin_app(store, config, keys, endpoints=("chat",), extra_routes=forwarding.routes())
    async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        yield client
    forwarding.close()
    await store.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[tuple[Public, httpx.AsyncClient]]:
    public = Public()
    async with listening(public.app) as url, admin(tmp_path, int(url.rpartition(":")[2])) as client:
        yield public, client


async def test_the_clients_key_decides_and_the_admin_key_is_not_asked(stage: Any) -> None:
    public, client = stage
    refused = await client.get("/v1/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["message"] == "no key"
    listed = await client.get("/v1/models", headers={**SECRET, "cookie": "a=b", "x-forwarded-for": "1.2.3.4"})
    assert listed.json() == {"data": [{"id": "fast"}]}
    assert listed.headers["x-request-id"] == "req_1"
    assert public.seen[-1]["authorization"] == SECRET["authorization"]
    assert not {"cookie", "x-forwarded-for"} & public.seen[-1].keys()
    assert (await client.get("/v1/embeddings", headers=SECRET)).status_code == 401  # the gate's own answer
    assert (await client.get("/admin/keys", headers=SECRET)).status_code == 401


async def test_a_stream_arrives_piece_by_piece_and_ends_upstream_when_the_client_leaves(stage: Any) -> None:
    public, client = stage
    async with client.stream("POST", "/v1/chat/completions", headers=SECRET, content=b"{}") as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: one\n\n"
        public.go_on.set()
        assert await anext(pieces) == b"data: two\n\n"
    assert public.bodies == [b"{}"]
    public.go_on.clear()
    public.is_left.clear()
    async with client.stream("POST", "/v1/chat/completions", headers=SECRET, content=b"{}") as answer:
        assert await anext(answer.aiter_bytes()) == b"data: one\n\n"
    await asyncio.wait_for(public.is_left.wait(), PATIENCE_S)


async def test_a_body_that_is_too_large_and_a_port_that_is_closed_are_said(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = stage
    monkeypatch.setattr(chat, "MAX_BODY", 1000)
    refused = await client.post("/v1/chat/completions", headers=SECRET, content=b" " * 1001)
    assert refused.status_code == 413
    monkeypatch.setattr(chat, "MAX_OPEN", 0)
    assert (await client.get("/v1/models", headers=SECRET)).status_code == 429
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    async with admin(tmp_path / "other", 1) as nowhere:
        answer = await nowhere.get("/v1/models", headers=SECRET)
    assert answer.status_code == 503
    assert "did not answer" in answer.json()["error"]["message"]
