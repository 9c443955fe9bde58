"""A gateway before our real server, whose engine is a script; and what its tests put into batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from ridgeline.server.records.state import open_state
from tests.gateway.stage import CHAT, Staged, staged
from tests.patience import PATIENCE_S
from tests.server.batch_stage import Server
from tests.server.scripted_client import Script, say

ENDED = ("completed", "failed", "cancelled", "expired")
SAYS = say("hi there!")


@contextlib.asynccontextmanager
async def our_server(tmp_path: Path, script: Script = SAYS) -> AsyncIterator[dict[str, Any]]:
    """The sections of a gateway.toml that is before it."""
    state = open_state(tmp_path / "server", 0)
    try:
        async with Server(state, script) as server, server.stage.served() as upstream:
            url = str(upstream.base_url).rstrip("/")
            yield {
                "upstreams": [{"name": "ours", "kind": "ridgeline", "url": url}],
                "models": [{"name": "public", "targets": ("ours/m",), "price_in": 1.0, "price_out": 2.0}],
            }
    finally:
        state.close()


@contextlib.asynccontextmanager
async def before_our_server(tmp_path: Path, **key: Any) -> AsyncIterator[Staged]:
    async with our_server(tmp_path) as values, staged(tmp_path, values, key) as stage:
        yield stage


def batch_line(number: int, **change: Any) -> str:
    body = {"model": "public", "messages": [{"role": "user", "content": f"q{number}"}]}
    line: dict[str, Any] = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}
    body.update(change.pop("body", {}))
    return json.dumps(line | change)


async def upload(http: httpx.AsyncClient, content: str, purpose: str = "batch") -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": purpose})


async def submit(http: httpx.AsyncClient, content: str) -> httpx.Response:
    """A batch of these lines."""
    file = (await upload(http, content)).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return await http.post("/v1/batches", json=body)


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(0.01)
