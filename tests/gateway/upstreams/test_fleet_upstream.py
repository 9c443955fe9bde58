"""A fleet as the gateway's upstream: one hop, with the gateway's keys, ledger, salts and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.gateway.settings import checked, make_settings
from ridgeline.options import OptionError
from ridgeline.replica.resume import ENGINE_DIED_HEADER
from tests.fleet.router.conftest import Stage, until
from tests.fleet.router.controller_socket import ControllerSocket
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica
from tests.gateway.mock_upstream import MockUpstream
from tests.gateway.stage import CHAT, Staged, asking, staged


def chunk() -> bytes:
    """The event of a token, whose number replaces %d."""
    choice = {"index": 0, "delta": {"content": "%d "}, "finish_reason": None}
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def ending(tokens: int) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    last = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": []}
    return b"data: " + msgspec.json.encode({**last, "usage": usage}) + b"\n\ndata: [DONE]\n\n"


class Front:
    def __init__(self, gateway: Staged, stage: Stage) -> None:
        self.gateway, self.stage = gateway, stage
        self.fleet = gateway.parts.upstreams.fleets()["pool"]

    async def add(self, count: int, **options: Any) -> list[ScriptedReplica]:
        made = await self.stage.add(count, **options)
        for one in made:
            one.event, one.ending = chunk(), ending(one.tokens)
        await until(lambda: self.fleet.has_table, "a table")
        await self.stage.heard(self.fleet)
        return made


@asynccontextmanager
async def front(tmp_path: Path, gateway: dict[str, Any] | None = None, **model: Any) -> AsyncIterator[Front]:
    path = tmp_path / "controller.sock"
    controller = await ControllerSocket(path, ModelEntry(MODEL, **model)).start()
    stage = Stage(controller)
    values = {
        "upstreams": [{"name": "pool", "kind": "fleet", "control": path}],
        "models": [{"name": "*", "targets": ("pool/*",), "price_in": 1.0, "price_out": 2.0}],
        "gateway": gateway or {},
    }
    try:
        async with staged(tmp_path, values) as made:
            yield Front(made, stage)
    finally:
        for replica in stage.replicas:
            await replica.stop()
        await controller.stop()


async def test_a_fleet_answers_with_the_gateways_books_and_a_salt_for_each_tenant(tmp_path: Path) -> None:
    async with front(tmp_path) as on:
        (replica,) = await on.add(1)
        answer = await on.gateway.http.post(CHAT, json=asking(MODEL, stream=True))
        assert answer.status_code == 200
        assert answer.text.count('"content"') == 8
        (row,) = await on.gateway.rows(1)
        assert (row["upstream"], row["tokens_in"], row["tokens_out"]) == ("pool", 5, 8)
        assert (row["outcome"], row["usage_source"]) == ("ok", "reported")
        _, other = await on.gateway.new_key(name="other")
        async with on.gateway.client(other) as client:
            assert (await client.post(CHAT, json=asking(MODEL))).status_code == 200
        salts = [body["cache_salt"] for body in replica.bodies]
        assert salts[0] != salts[1]
        listed = (await on.gateway.http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == [MODEL]
        page = on.gateway.assembly.metrics_page()
        assert f'ridgeline_fleet_requests_total{{upstream="pool",model="{MODEL}",outcome="ok"}} 2' in page


async def test_a_stream_through_the_gateway_survives_its_replica(tmp_path: Path) -> None:
    async with front(tmp_path) as on:
        first, second = await on.add(2)
        first.gate = second.gate = asyncio.Event()
        asked = asyncio.create_task(on.gateway.http.post(CHAT, json=asking(MODEL, stream=True)))
        await until(lambda: on.fleet.books[MODEL].output_tokens == 4, "four tokens")
        dying, other = (first, second) if first.running else (second, first)
        await dying.die()
        other.gate = None
        text = (await asked).text
        told = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        tokens = [choice["delta"]["content"] for event in told for choice in event["choices"]]
        assert tokens == [f"{n} " for n in range(8)]
        assert text.endswith("data: [DONE]\n\n")
        (row,) = await on.gateway.rows(1)
        assert (row["outcome"], row["tokens_out"], row["attempts"]) == ("ok", 8, 1)
        assert len(other.states) == 1


async def test_a_request_that_kills_replicas_is_not_sent_again_by_the_gateway(tmp_path: Path) -> None:
    async with front(tmp_path) as on:
        replicas = await on.add(6)
        for one in replicas:
            one.status, one.status_lines = 503, (f"{ENGINE_DIED_HEADER}: 1",)
        refused = await on.gateway.http.post(CHAT, json=asking(MODEL))
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "request_quarantined")
        assert sum(len(one.bodies) for one in replicas) == 2
        (row,) = await on.gateway.rows(1)
        assert (row["error_code"], row["attempts"]) == ("request_quarantined", 1)


@pytest.mark.parametrize("model", ["mock_out64", "mock_out8_pace1"])
async def test_the_mock_upstream_is_a_replica_with_markers_that_no_client_sees(
    tmp_path: Path, model: str
) -> None:
    """`benchmarks/fleet_router.py` measures what reading them costs."""
    mock = await MockUpstream().start()
    try:
        async with front(tmp_path, aliases=(model,)) as on:
            on.stage.controller.set(ReplicaEntry("m0", MODEL, mock.url, "ready", "", "v1"))
            await until(lambda: on.fleet.has_table and on.fleet.book.candidates(MODEL), "the mock")
            answer = await on.gateway.http.post(CHAT, json=asking(model, stream=True))
            tokens = int(model.split("_")[1].removeprefix("out"))
            assert on.fleet.books[MODEL].output_tokens == tokens  # as its markers say
            assert answer.text.count('"content":" river"') == tokens
            assert answer.text.endswith("data: [DONE]\n\n")
            assert ":r {" not in answer.text
    finally:
        await mock.stop()


async def test_the_gateways_region_and_a_keys_residency_reach_the_fleet(tmp_path: Path) -> None:
    async with front(tmp_path, gateway={"region": "eu"}) as on:
        (near,) = await on.add(1, region="eu")
        (far,) = await on.add(1, region="us")
        for _ in range(4):
            assert (await on.gateway.http.post(CHAT, json=asking(MODEL))).status_code == 200
        assert (len(near.bodies), len(far.bodies)) == (4, 0)
        _, abroad = await on.gateway.new_key(name="abroad", residency=("u*",))
        _, nowhere = await on.gateway.new_key(name="nowhere", residency=("asia",))
        async with on.gateway.client(abroad) as client:
            assert (await client.post(CHAT, json=asking(MODEL))).status_code == 200
        assert (len(near.bodies), len(far.bodies)) == (4, 1)
        async with on.gateway.client(nowhere) as client:
            refused = await client.post(CHAT, json=asking(MODEL))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert "residency allows the regions asia" in refused.json()["error"]["message"]


async def test_a_saturated_fleet_is_a_429_and_a_cold_one_a_503(tmp_path: Path) -> None:
    async with front(tmp_path, max_held=0, cold_s=0.2) as on:
        on.stage.publish()
        await until(lambda: on.fleet.has_table, "a table")
        refused = await on.gateway.http.post(CHAT, json=asking(MODEL))
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        entry = ModelEntry(MODEL, max_held=4, cold_s=0.2)
        on.stage.controller.set(model=entry)
        await until(lambda: on.fleet.held[MODEL].queue.max_held == 4, "the new table")
        cold = await on.gateway.http.post(CHAT, json=asking(MODEL))
        assert (cold.status_code, cold.json()["error"]["code"]) == (503, "no_replica")
        unknown = await on.gateway.http.post(CHAT, json=asking("none"))
        assert (unknown.status_code, "no model is named 'none'" in unknown.text) == (404, True)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "fleet"}, "needs the address of its controller"),
        ({"kind": "fleet", "control": Path("/x"), "region": "eu"}, r"set \[gateway\] region"),
        (
            {"kind": "fleet", "control": Path("/x"), "url": "http://h:1"},
            "needs the address of its controller",
        ),
        ({"kind": "ridgeline", "url": "http://h:1", "control": Path("/x")}, 'for kind = "fleet" only'),
    ],
)
def test_the_address_of_the_controller_is_checked(table: dict[str, Any], said: str) -> None:
    values = {"upstreams": [{"name": "pool", **table}], "models": [{"name": "*", "targets": ("pool/*",)}]}
    with pytest.raises(OptionError, match=said):
        checked(make_settings(values))


def test_files_are_not_kept_in_a_fleet() -> None:
    pool = {"name": "pool", "kind": "fleet", "control": Path("/x.sock")}
    values: dict[str, Any] = {"upstreams": [pool], "models": [{"name": "*", "targets": ("pool/*",)}]}
    assert checked(make_settings(values)).objects_upstream is None
    values["gateway"] = {"objects_upstream": "pool"}
    with pytest.raises(OptionError, match="is a fleet"):
        checked(make_settings(values))


async def test_a_continued_response_goes_to_the_replica_that_stores_it(tmp_path: Path) -> None:
    async with front(tmp_path) as on:
        made = [(await on.add(1, epoch=f"{number:016x}"))[0] for number in range(3)]
        for replica in made:
            replica.extra = {"id": f"resp_{replica.epoch}{'9' * 32}", "object": "response", "output": []}
        asked = {"model": MODEL, "input": "hello"}
        first = (await on.gateway.http.post("/v1/responses", json=asked)).json()
        for _ in range(6):
            more = asked | {"previous_response_id": first["id"]}
            assert (await on.gateway.http.post("/v1/responses", json=more)).json() == first
        stores = next(one for one in made if one.epoch in first["id"])
        assert len(stores.bodies) == 7
        on.stage.publish(stores)
        await until(lambda: stores.id not in on.fleet.replicas, "the table")
        gone = await on.gateway.http.post("/v1/responses", json=more)
        assert (gone.status_code, gone.json()["error"]["param"]) == (400, "previous_response_id")
