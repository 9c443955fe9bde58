"""A worker of the gateway in the test's own loop, on a real port, before a mock upstream that keeps books."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ridgeline.gateway.objects.batch_booking import BatchBooking
from ridgeline.gateway.pipeline.app import Gateway
from ridgeline.gateway.pipeline.own_embeddings import KEY
from ridgeline.gateway.process.assembly import Assembly
from ridgeline.gateway.settings import GatewaySettings, checked, make_settings
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.keys import Key
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from tests.gateway.mock_upstream import MockUpstream
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"


def asking(model: str = "mock", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Say something."}], **fields}


class Staged:
    """One running gateway: `http` asks it with the key of its first tenant."""

    def __init__(self, assembly: Assembly, app: Gateway, url: str, mock: MockUpstream, secret: str) -> None:
        self.assembly, self.app, self.url, self.mock, self.secret = assembly, app, url, mock, secret
        self.http = self.client(secret)

    @property
    def parts(self) -> Any:
        return self.assembly.parts

    @property
    def batches(self) -> BatchBooking:
        return self.assembly.batches

    def client(self, secret: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    async def new_key(self, **fields: Any) -> tuple[Key, str]:
        """A key beside the first, known to the worker when this returns."""
        made = await make_key(self.parts.settings, **fields)
        await self.parts.keys.refresh()
        return made

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """The ledger's rows of clients, oldest first, once there is this number of them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [row for row in self.written_rows() if row["key_id"] != KEY]) < count:
                await asyncio.sleep(0.02)
        assert len(found) == count, found
        return found

    async def upstream_is_idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.mock.running:
                await asyncio.sleep(0.002)

    def written_rows(self) -> list[dict[str, Any]]:
        return _rows(self.parts.settings.state_dir / "ledger.sqlite")


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        try:
            found = connection.execute("SELECT * FROM ridgeline_ledger ORDER BY at_ms, request_id").fetchall()
        except sqlite3.OperationalError:  # no table yet
            return []
        return [dict(row) for row in found]


async def make_key(settings: GatewaySettings, **fields: Any) -> tuple[Key, str]:
    store = Store(settings.store, settings.state_dir)
    try:
        record, secret = await Registry(store).create_key(
            lambda id: Key(id, fields.pop("name", "test"), **fields), Actor("test", "127.0.0.1")
        )
        return record.key, secret
    finally:
        await store.close()


def settings_for(tmp_path: Path, mock: MockUpstream, values: Mapping[str, Any]) -> GatewaySettings:
    """A gateway before the mock alone, whatever `values` add or replace."""
    sections: dict[str, Any] = {
        "upstreams": [{"name": "mock", "kind": "ridgeline", "url": mock.url, "probe_s": 0.0}],
        "models": [{"name": "*", "targets": ("mock/*",), "price_in": 1.0, "price_out": 2.0}],
        "retries": {"backoff_ms": 1.0, "backoff_max_ms": 5.0},
        "observe": {},
        **values,
    }
    sections["gateway"] = {"state_dir": tmp_path / "state", **values.get("gateway", {})}
    return checked(make_settings(sections))


@contextlib.asynccontextmanager
async def staged(
    tmp_path: Path, values: Mapping[str, Any] | None = None, key: Mapping[str, Any] | None = None
) -> AsyncIterator[Staged]:
    """`values`: sections of gateway.toml; `key`: fields of the first key."""
    mock = await MockUpstream().start()
    settings = settings_for(tmp_path, mock, values or {})
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    _, secret = await make_key(settings, **(key or {}))
    assembly = await Assembly.make(settings, 0)
    await assembly.start_booking()
    app = Gateway(assembly.parts, assembly.batches)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    gateway = settings.gateway
    limits = ConnectionLimits(gateway.max_head_bytes, gateway.head_timeout_s, 1000, None)
    server = HttpServer(app, limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    stage = Staged(assembly, app, f"http://127.0.0.1:{listener.getsockname()[1]}", mock, secret)
    try:
        yield stage
    finally:
        await stage.http.aclose()
        server.should_exit = True
        await serving
        await app.drained()
        await assembly.close()
        await mock.stop()
