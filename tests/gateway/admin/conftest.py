"""The admin app over a SQLite store, asked in process; the tests of the store hold for PostgreSQL too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys, key_file, read_admin_keys
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.key_table import KeyTable
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store

ENDPOINTS = ("chat", "embeddings", "messages")


@dataclass
class Admin:
    store: Store
    client: httpx.AsyncClient
    key: str
    key_path: Path
    reloads: list[int]

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """With the admin key, and JSON where there is a body to send."""
        headers = {"authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        if method not in ("GET", "HEAD") and "content" not in options:
            options["json"] = {} if body is None else body
        return await self.client.request(method, path, headers=headers, **options)

    async def create_key(self, **fields: Any) -> dict[str, Any]:
        answer = await self.ask("POST", "/admin/keys", {"name": "app", **fields})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def key_table(self) -> KeyTable:
        return KeyTable(self.store.server_secret).apply(await self.store.changes(0))

    async def audit(self) -> list[Any]:
        return await Registry(self.store).audit(None, None, 1000)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    store = Store(StoreConfig(), tmp_path)
    config = AdminConfig(wrong_key_delay_s=0.0)
    keys = AdminKeys(key_file(config, tmp_path))
    reloads: list[int] = []

    async def usage(request: Request) -> PlainTextResponse:
        return PlainTextResponse("12 cents")

    async def reload() -> dict[str, int]:
        reloads.append(1)
        return {"models": 2}

    app = admin_app(
        store,
        config,
        keys,
        endpoints=ENDPOINTS,
        guards=lambda: ("strict",),
        status=lambda: [{"name": "gpu", "breaker": "closed"}],
        metrics=lambda: "ridgeline_up 1\n",
        reload=reload,
        extra_routes=[Route("/admin/usage", usage)],
    )
    key = read_admin_keys(keys.path)[0][1]
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 40000))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin.test") as client:
        yield Admin(store, client, key, keys.path, reloads)
    await store.close()
