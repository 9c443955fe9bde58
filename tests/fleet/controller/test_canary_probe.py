"""A canary without traffic is asked to generate, beside a replica of the old version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from ridgeline.fleet.controller.canary_probe import PROBES, TOKENS, probe_canary
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.proxy.http_client import HttpClient
from tests.fleet.router.small_http import Asked, SmallHttp


class Server:
    def __init__(self) -> None:
        self.status, self.wait_s = 200, 0.0
        self.models = b'{"data":[{"id":"m","task":"generate"}]}'
        self.asked: list[dict[str, object]] = []
        self._http = SmallHttp(self._answer)

    async def replica(self, id: str) -> Replica:
        await self._http.start()
        made = Replica(id, "m", "v", time.monotonic())
        made.url = f"http://127.0.0.1:{self._http.port}"
        return made

    async def stop(self) -> None:
        await self._http.stop()

    async def _answer(self, asked: Asked) -> None:
        if asked.method == "GET":
            asked.whole(200, self.models)
            return
        assert asked.headers["authorization"] == "Bearer key"
        self.asked.append(msgspec.json.decode(asked.body))
        await asyncio.sleep(self.wait_s)
        asked.whole(self.status, b'{"error":{"message":"scripted"}}')


@pytest.fixture
async def servers() -> AsyncIterator[tuple[Server, Server]]:
    made = Server(), Server()
    yield made
    for one in made:
        await one.stop()


async def probe(servers: tuple[Server, Server], ratio: float = 2.0, alone: bool = False) -> str:
    new, old = [await one.replica(name) for one, name in zip(servers, ("new", "old"), strict=True)]
    client = HttpClient()
    try:
        return await probe_canary(ReplicaLink(client, "key"), new, None if alone else old, ratio)
    finally:
        client.close()


async def test_a_canary_that_generates_as_fast_is_good(servers: tuple[Server, Server]) -> None:
    assert await probe(servers, ratio=1e6) == ""
    for one in servers:
        assert [body["max_tokens"] for body in one.asked] == [TOKENS] * PROBES


async def test_a_canary_that_fails_is_not(servers: tuple[Server, Server]) -> None:
    servers[0].status = 500
    assert (await probe(servers)).startswith("POST /v1/completions: status 500")
    servers[0].asked.clear()


@pytest.mark.parametrize(
    "models", [b"<html>", b"[]", b'{"data":3}', b'{"data":["m"]}', b'{"data":[{"task":"\xff"}]}']
)
async def test_a_canary_whose_models_cannot_be_read_is_not(
    servers: tuple[Server, Server], models: bytes
) -> None:
    servers[0].models = models
    assert (await probe(servers)).startswith("GET /v1/models: its answer cannot be read: ")


async def test_a_slow_canary_is_not(servers: tuple[Server, Server]) -> None:
    servers[0].wait_s = 0.2
    assert "ms of the old version; allowed is 1.01 times as much" in await probe(servers, ratio=1.01)


async def test_a_slow_canary_that_repairs_a_failing_version_is_good(servers: tuple[Server, Server]) -> None:
    servers[0].wait_s, servers[1].status = 0.2, 500
    assert await probe(servers, ratio=1.01) == ""
    assert (len(servers[0].asked), len(servers[1].asked)) == (PROBES, 1)


async def test_without_an_old_replica_its_own_answers_decide(servers: tuple[Server, Server]) -> None:
    assert await probe(servers, alone=True) == ""
    assert servers[1].asked == []
