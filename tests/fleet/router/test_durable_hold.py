"""Requests with a key at zero replicas: kept over a kill -9, found at every router, run in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.queueing.durable import DurableQueue
from ridgeline.fleet.router.app import RouterApp
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.durable.durable_hold import DurableHold
from ridgeline.fleet.router.durable.read_held import read_held
from ridgeline.fleet.router.process import config_line, open_journal, router_command
from tests.fleet.router.conftest import Stage, counted, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.served import listening, served
from tests.patience import PATIENCE_S

PATH = "/v1/chat/completions"


@pytest.fixture
def durable(stage: Stage) -> ModelEntry:
    entry = ModelEntry(MODEL, max_held=32, hold_s=0.2, cold_s=PATIENCE_S, durable=True)
    stage.controller.set(model=entry)
    return entry


def chat(number: int = 0, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"n {number}"}], **more}


def numbers(bodies: list[dict[str, Any]]) -> list[int]:
    return [int(body["messages"][0]["content"].split()[1]) for body in bodies]


def key(name: object, secret: str = "") -> dict[str, str]:
    named = {"idempotency-key": f"key {name}"}
    return named | ({"authorization": f"Bearer {secret}"} if secret else {})


@asynccontextmanager
async def front(stage: Stage, folder: Path, *keys: str) -> AsyncIterator[httpx.AsyncClient]:
    """A router with the journal, in the test's loop."""
    config = RouterConfig(keys=keys, held_dir=str(folder), keeps_journal=True)
    router = await stage.router()
    hold = DurableHold(router, open_journal(config), lambda held: read_held(held, PATIENCE_S))
    hold.start()
    async with served(RouterApp(router, config, hold)) as client:
        try:
            yield client
        finally:
            await hold.stop()


async def is_waiting(client: httpx.AsyncClient, name: str, **headers: Any) -> dict[str, Any]:
    """What GET /fleet/held says, once the request is in the journal."""
    for _ in range(int(PATIENCE_S / 0.01)):
        shown = await client.get(f"/fleet/held/{name}", **headers)
        if shown.status_code == 202:
            return dict(shown.json())
        await asyncio.sleep(0.01)
    raise AssertionError(f"not held: {shown.status_code} {shown.text}")


async def test_a_held_request_is_answered_and_its_key_gives_the_same_answer_again(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    # The request without a key waits on when a replica is ready, and then against hold_s.
    stage.controller.set(model=msgspec.structs.replace(durable, hold_s=PATIENCE_S))
    async with front(stage, tmp_path / "held") as client:
        asked = asyncio.create_task(client.post(PATH, json=chat(), headers=key(1)))
        shown = await is_waiting(client, "key 1")
        assert (shown["state"], shown["position"]) == ("waiting", 1)
        assert (await is_waiting(client, shown["id"])) == shown
        plain = asyncio.create_task(client.post(PATH, json=chat(7)))
        again = asyncio.create_task(client.post(PATH, json=chat(), headers=key(1)))
        other = await client.post(PATH, json=chat(2), headers=key(1))
        assert (other.status_code, other.json()["error"]["code"]) == (422, "key_reused")
        (first,) = await stage.add()
        answers = [await asked, await again, await client.post(PATH, json=chat(), headers=key(1))]
        answers.append(await client.get(f"/fleet/held/{shown['id']}"))
        assert [(one.status_code, one.content) for one in answers] == [(200, answers[0].content)] * 4
        assert {one.headers["x-ridgeline-held-id"] for one in answers} == {shown["id"]}
        assert (await plain).status_code == 200
        assert sorted(numbers(first.bodies)) == [0, 7]
        assert [one.get("idempotency-key") for one in first.headers].count("key 1") == 1
        served = await client.post(PATH, json=chat(3), headers=key(3))  # a replica serves: nothing is kept
        assert served.status_code == 200
        for unknown in ("key 3", "held-0"):
            assert (await client.get(f"/fleet/held/{unknown}")).status_code == 404


async def test_a_held_request_runs_though_its_client_has_left(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    async with front(stage, tmp_path / "held") as client:
        asked = asyncio.create_task(client.post(PATH, json=chat(), headers=key(1)))
        shown = await is_waiting(client, "key 1")
        asked.cancel()
        (first,) = await stage.add()
        await until(lambda: first.bodies and not first.running, "the answer")
        again = await client.post(PATH, json=chat(), headers=key(1))
        assert (again.status_code, again.headers["x-ridgeline-held-id"]) == (200, shown["id"])
        assert len(first.bodies) == 1


async def test_a_held_stream_is_streamed_and_kept(stage: Stage, durable: ModelEntry, tmp_path: Path) -> None:
    async with front(stage, tmp_path / "held") as client:
        gate = asyncio.Event()
        asking = client.stream("POST", PATH, json=chat(stream=True), headers=key(1))
        waiting = asyncio.create_task(asking.__aenter__())
        await is_waiting(client, "key 1")
        (first,) = await stage.add()
        first.gate = gate
        answer = await waiting
        pieces = answer.aiter_bytes()
        got = await anext(pieces)  # before the replica has made the whole answer
        assert got.startswith(b'data: {"token":0}')
        gate.set()
        async for piece in pieces:
            got += piece
        await asking.__aexit__(None, None, None)
        assert got == counted(8)
        again = await client.post(PATH, json=chat(stream=True), headers=key(1))
        assert (again.content, again.headers["content-type"]) == (counted(8), "text/event-stream")
        assert len(first.bodies) == 1


async def test_a_held_request_is_shown_to_its_own_key_alone(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    async with front(stage, tmp_path / "held", "one", "two") as client:
        asked = asyncio.create_task(client.post(PATH, json=chat(), headers=key(1, "one")))
        own, foreign = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        shown = await is_waiting(client, "key 1", headers=own)
        for name in ("key 1", shown["id"]):
            assert (await client.get(f"/fleet/held/{name}", headers=foreign)).status_code == 404
            assert (await client.get(f"/fleet/held/{name}")).status_code == 401
        second = asyncio.create_task(client.post(PATH, json=chat(2), headers=key(1, "two")))
        assert (await is_waiting(client, "key 1", headers=foreign))["position"] == 2
        (first,) = await stage.add()
        assert [(await one).status_code for one in (asked, second)] == [200, 200]
        assert len(first.bodies) == 2


async def test_a_wait_beyond_cold_s_is_a_503_and_the_key_starts_a_new_request(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    stage.controller.set(model=msgspec.structs.replace(durable, cold_s=0.3))
    async with front(stage, tmp_path / "held") as client:
        refused = await client.post(PATH, json=chat(), headers=key(1))
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert (await client.get("/fleet/held/key 1")).status_code == 404
        await stage.add()
        await stage.heard(stage.routers[0])
        assert (await client.post(PATH, json=chat(), headers=key(1))).status_code == 200


async def test_a_replica_that_residency_bars_leaves_its_model_cold(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    stage.controller.set(
        model=msgspec.structs.replace(durable, residency=("eu",), regions=("eu",), max_held=2)
    )
    (barred,) = await stage.add(region="us")
    async with front(stage, tmp_path / "held") as client:
        asked = asyncio.create_task(client.post(PATH, json=chat(), headers=key(1)))
        assert (await is_waiting(client, "key 1"))["position"] == 1
        plain = asyncio.create_task(client.post(PATH, json=chat(2)))
        await until(lambda: stage.routers[0].held.count(MODEL) == 2, "both requests")
        full = await client.post(PATH, json=chat(3), headers=key(3))  # also by those without a key
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        (allowed,) = await stage.add(region="eu")
        assert [(await one).status_code for one in (asked, plain)] == [200, 200]
        assert (len(barred.bodies), len(allowed.bodies)) == (0, 2)


async def test_without_its_journal_a_router_refuses_what_it_cannot_keep(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    taken = DurableQueue(tmp_path / "held" / "journal")
    try:
        async with front(stage, tmp_path / "held") as client:
            refused = await client.post(PATH, json=chat(), headers=key(1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "held_unavailable")
            bad = await client.post(PATH, json=chat(), headers={"idempotency-key": "x" * 300})
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_key")
            await stage.add()
            await stage.heard(stage.routers[0])
            assert (await client.post(PATH, json=chat(), headers=key(1))).status_code == 200
    finally:
        taken.close()


class Router:
    """A router process. Its listener outlives it."""

    def __init__(self, stage: Stage, **config: Any) -> None:
        self.listener, self._config = listening(), RouterConfig(**config)
        self._command = router_command(self.listener.fileno(), stage.controller.path)
        self.client = httpx.AsyncClient(base_url=self._url(self.listener), timeout=PATIENCE_S)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, pass_fds=[self.listener.fileno()]
        )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(config_line(self._config))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def close(self) -> None:
        await self.client.aclose()
        self.kill()
        self.listener.close()

    @staticmethod
    def _url(listener: socket.socket) -> str:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_held_requests_survive_kill_9_of_the_router_keep_their_order_and_are_found_at_another(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    count, folder = 12, str(tmp_path / "held")
    owner, other = Router(stage, held_dir=folder, keeps_journal=True), Router(stage, held_dir=folder)
    try:
        asked = []
        for number in range(count):
            client = (owner if number % 2 else other).client
            asked.append(asyncio.create_task(client.post(PATH, json=chat(number), headers=key(number))))
            shown = await is_waiting(other.client, f"key {number}")
            assert shown["position"] == number + 1
        await until(lambda: held_of(stage) == count, "a report of all held requests")
        owner.kill()
        for lost in asked[1::2]:  # their connections ended with the process
            with pytest.raises(httpx.TransportError):
                await lost
        stage.controller.demands.clear()
        owner.start()
        await until(lambda: held_of(stage) == count, "a report of all held requests after the restart")
        (first,) = await stage.add(max_running=1)
        kept = [await one for one in asked[0::2]]  # the other router has asked again for them
        again = [
            await other.client.post(PATH, json=chat(number), headers=key(number))
            for number in range(1, count, 2)
        ]
        assert [one.status_code for one in (*kept, *again)] == [200] * count
        assert all(len(one.headers.get_list("content-length")) == 1 for one in (*kept, *again))
        assert numbers(first.bodies) == list(range(count))
        assert max(held_in(stage)) == count  # no request counts twice for the autoscaler
    finally:
        for router in (owner, other):
            with contextlib.suppress(Exception):
                await router.close()


def held_in(stage: Stage) -> list[int]:
    return [sum(model.held for model in one.models) for one in stage.controller.demands]


def held_of(stage: Stage) -> int:
    return max(held_in(stage), default=0)


async def test_the_journal_has_figures_and_a_replayed_request_is_no_new_demand(
    stage: Stage, durable: ModelEntry, tmp_path: Path
) -> None:
    async def figures(client: httpx.AsyncClient) -> dict[str, float]:
        lines = (await client.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("ridgeline_fleet_"): float(value) for name, value in values.items()}

    arrived = f'arrived_total{{model="{MODEL}",router="router"}}'
    async with front(stage, tmp_path / "held") as client:
        asked = [asyncio.create_task(client.post(PATH, json=chat(n), headers=key(n))) for n in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while (seen := await figures(client)).get(
                arrived
            ) != 2:  # they are sent once they are on the disk
                await asyncio.sleep(0.01)
        assert (seen["journal_waiting"], seen['journal_appended_total{router="router"}']) == (2, 2)
        assert seen["journal_oldest_seconds"] > 0
        assert seen["journal_bytes"] > 100
        oldest = seen["journal_oldest_seconds"]
    await asyncio.gather(*asked, return_exceptions=True)
    await stage.routers[0].stop()
    stage.controller.demands.clear()
    async with front(stage, tmp_path / "held") as client:
        seen = await figures(client)
        assert (seen["journal_waiting"], seen['journal_replayed_total{router="router"}']) == (2, 2)
        assert seen["journal_oldest_seconds"] >= oldest
        await stage.add()
        for n in range(2):
            assert (await client.post(PATH, json=chat(n), headers=key(n))).status_code == 200
        seen = await figures(client)
        assert (seen["journal_waiting"], seen["journal_answers"], seen[arrived]) == (0, 2, 0)
        assert seen[f'requests_total{{model="{MODEL}",outcome="ok",router="router"}}'] == 2
        await until(lambda: stage.controller.demands, "a report of demand")
        assert sum(of.arrived for one in stage.controller.demands for of in one.models) == 0
