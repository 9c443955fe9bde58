"""A stage with its batches under way, and lines to put into them; for the tests of batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.server.batches.endpoints import Batches
from ridgeline.server.config import ServerConfig
from ridgeline.server.records.state import StateStore
from tests.patience import PATIENCE_S
from tests.server.scripted_client import Script, say
from tests.server.stage import CHAT, Stage

HELLO = say("hé!")


class Server:
    """A stage with its batches under way."""

    def __init__(self, state: StateStore, script: Script = HELLO, **config: Any) -> None:
        self.stage = Stage(script, ServerConfig(**config), state)
        headers = {"authorization": f"Bearer {config['api_keys'][0]}"} if "api_keys" in config else {}
        self.http = self.stage.http(headers=headers)
        self.batches = self.stage.served_models.part(Batches)

    async def __aenter__(self) -> Server:
        keys = self.stage.config.accepted_keys()
        await self.batches.runner.start(self.stage.app, keys[0] if keys else None, 4)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.batches.runner.stop()
        await self.http.aclose()

    async def upload(self, content: str | bytes, purpose: str = "batch") -> str:
        files = {"file": ("in.jsonl", content)}
        answer = await self.http.post("/v1/files", files=files, data={"purpose": purpose})
        return answer.json()["id"]

    async def create(self, content: str | bytes, endpoint: str = CHAT, **more: Any) -> dict[str, Any]:
        body = {
            "input_file_id": await self.upload(content),
            "endpoint": endpoint,
            "completion_window": "24h",
        }
        answer = await self.http.post("/v1/batches", json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def show(self, batch_id: str) -> dict[str, Any]:
        return (await self.http.get(f"/v1/batches/{batch_id}")).json()

    async def over(self, batch_id: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                batch = await self.show(batch_id)
                if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                    return batch
                await asyncio.sleep(0.005)

    async def completed(self, batch_id: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.show(batch_id))["request_counts"]["completed"] < count:
                await asyncio.sleep(0.005)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = (await self.http.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(line) for line in content.splitlines()]


def line(number: int, url: str = CHAT, **body: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}]} | body
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body})


def lines(count: int) -> str:
    return "\n".join(line(i) for i in range(count))


def taking_turns(*scripts: Script) -> Script:
    """The first request is answered by the first script, …; the last answers all further ones."""
    calls = iter(range(10**9))

    def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        return scripts[min(next(calls), len(scripts) - 1)](prompt, params)

    return script
