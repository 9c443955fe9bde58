"""Vector stores through the gateway, before a real server with two models: they belong to their tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.conftest import LiveServer, await_ready, start_server
from tests.gateway.scripted_upstream import always
from tests.gateway.stage import Staged, staged
from tests.gateway.test_trust import scripted
from tests.patience import PATIENCE_S
from tests.retrieval.real_stores import KINDS, store_flags

MODEL = "smollm2-135m"
SECRET = "The vault of the harbour opens at midnight. Its code is kept by the keeper of the lamp.\n"
STORES = "/v1/vector_stores"


@pytest.fixture(scope="module", params=KINDS)
def store_flags_here(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    with store_flags(request.param) as flags:
        yield flags


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, store_flags_here: tuple[str, ...]
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("behind_gateway")
    flags = ("--state-dir", str(folder / "state"), "--deterministic", *store_flags_here)
    started = start_server(folder / "log", *flags, models=(MODEL, "all-minilm-l6-v2"))
    try:
        await_ready(started)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE_S)


@pytest_asyncio.fixture
async def gateway(server: LiveServer, tmp_path: Path) -> AsyncIterator[Staged]:
    values = {
        "upstreams": [{"name": "own", "kind": "ridgeline", "url": server.base_url, "probe_s": 0.0}],
        "models": [{"name": "*", "targets": ("own/*",), "price_in": 1.0, "price_out": 2.0}],
    }
    async with staged(tmp_path, values) as stage:
        yield stage


def client_of(gateway: Staged, secret: str) -> openai.AsyncOpenAI:
    url = str(gateway.http.base_url).rstrip("/")
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=PATIENCE_S)


async def filled(client: openai.AsyncOpenAI, text: str) -> tuple[str, str]:
    """A store with one file that is searchable: their ids."""
    file = await client.files.create(file=("secret.txt", text.encode()), purpose="assistants")
    store = await client.vector_stores.create(name="mine", file_ids=[file.id])
    await client.vector_stores.files.poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    return store.id, file.id


async def test_the_sdk_works_through_the_gateway_and_tokens_are_booked(gateway: Staged) -> None:
    async with client_of(gateway, gateway.secret) as client:
        store, file = await filled(client, SECRET)
        found = await client.vector_stores.search(store, query="When does the vault open?")
        assert found.data[0].file_id == file
        changed = await client.vector_stores.files.update(file, vector_store_id=store, attributes={"n": 1})
        assert changed.attributes == {"n": 1}
        assert (await client.vector_stores.files.list(store, limit=5, order="asc")).data[0].id == file
        content = await client.vector_stores.files.content(file, vector_store_id=store)
        assert content.data[0].text == SECRET
        batch = await client.vector_stores.file_batches.create_and_poll(store, file_ids=[file])
        assert batch.file_counts.completed == 1
        assert [one.id for one in (await client.vector_stores.list()).data] == [store]
        tools: Any = [{"type": "file_search", "vector_store_ids": [store]}]
        answer = await client.responses.create(
            model=MODEL, input="When does the vault open?", tools=tools, max_output_tokens=8, store=False
        )
        assert answer.output[0].type == "file_search_call"
        assert (await client.vector_stores.update(store, name="renamed")).name == "renamed"
        assert (await client.vector_stores.files.delete(file, vector_store_id=store)).deleted
        assert (await client.vector_stores.retrieve(store)).file_counts.total == 0
        assert (await client.vector_stores.delete(store)).deleted
        assert (await client.vector_stores.list()).data == []
        rows = [row for row in await until_booked(gateway) if row["endpoint"] == "responses"]
    assert answer.usage is not None
    assert [row["tokens_in"] for row in rows] == [answer.usage.input_tokens]


async def until_booked(gateway: Staged) -> list[dict[str, Any]]:
    await gateway.app.drained()
    return gateway.written_rows()


async def test_two_tenants_with_the_same_text_reach_nothing_of_each_other(gateway: Staged) -> None:
    _, secret = await gateway.new_key(name="other")
    async with client_of(gateway, gateway.secret) as mine, client_of(gateway, secret) as other:
        store, file = await filled(mine, SECRET)
        theirs, their_file = await filled(other, SECRET)
        assert [one.id for one in (await other.vector_stores.list()).data] == [theirs]
        for search in (mine.vector_stores.search(store, query="vault"),):
            assert {one.file_id for one in (await search).data} == {file}
        tools: Any = [{"type": "file_search", "vector_store_ids": [theirs, store]}]
        stores = other.vector_stores
        calls: list[tuple[Any, str | None]] = [
            (stores.retrieve(store), None),
            (stores.update(store, name="x"), None),
            (stores.delete(store), None),
            (stores.search(store, query="vault"), None),
            (stores.files.list(store), None),
            (stores.files.create(store, file_id=their_file), None),
            (stores.files.content(file, vector_store_id=store), None),
            (stores.files.delete(file, vector_store_id=store), None),
            (stores.files.create(theirs, file_id=file), "file_id"),
            (stores.create(file_ids=[their_file, file]), "file_ids[1]"),
            (stores.file_batches.create(theirs, file_ids=[file]), "file_ids[0]"),
            (stores.file_batches.create(theirs, files=[{"file_id": file}]), "files[0].file_id"),
            (stores.file_batches.create(store, file_ids=[their_file]), None),
            # Another store's file in a path of the tenant's own store: it is not in that store.
            (stores.files.content(file, vector_store_id=theirs), "file_id"),
            (other.responses.create(model=MODEL, input="vault?", tools=tools), "tools[0].vector_store_ids"),
        ]
        for call, param in calls:
            with pytest.raises(openai.NotFoundError) as raised:
                await call
            assert raised.value.param == param
        assert (await mine.vector_stores.retrieve(store)).file_counts.completed == 1
        [found] = (await other.vector_stores.search(theirs, query="vault")).data
        assert found.file_id == their_file
        await mine.vector_stores.delete(store)
        assert (await other.vector_stores.retrieve(theirs)).file_counts.completed == 1


async def test_paths_queries_and_bodies_reach_the_upstream_only_as_checked(tmp_path: Path) -> None:
    body = {"id": "vs_1", "object": "vector_store"}
    async with scripted(tmp_path, always(200, body)) as (stage, upstream):
        assert (await stage.http.post(STORES, json={"name": "x"})).status_code == 200
        store = f"{STORES}/vs_1"
        refused = [
            ("GET", f"{store}/files/a%2F..%2Fb", {}, 404),
            ("GET", f"{store}/files/a/../../x", {}, 404),
            ("GET", f"{store}/files//content", {}, 404),
            ("GET", f"{store}/files?after=a%20b", {}, 400),
            ("GET", f"{STORES}?before=vs_1", {}, 400),
            ("GET", f"{STORES}?order=asc", {}, 400),
            ("PUT", store, {}, 405),
            ("DELETE", f"{store}/search", {}, 405),
            ("POST", f"{store}/files", {"content": b'{"file_id": 1}'}, 400),
            ("POST", f"{store}/file_batches", {"content": b'{"files": [1]}'}, 400),
            ("POST", f"{store}/file_batches", {"content": b'{"file_ids": "x"}'}, 400),
            ("POST", f"{store}/file_batches", {"content": b'{"files": [{"attributes": {}}]}'}, 400),
            ("POST", f"{store}/search", {"content": b'{"query": '}, 400),
        ]
        before = len(upstream.asked)
        for method, path, more, status in refused:
            answer = await stage.http.request(method, path, **more)
            assert answer.status_code == status, (method, path, answer.text)
        assert len(upstream.asked) == before
        listed = await stage.http.get(f"{store}/files", params={"limit": 3, "unknown": "x y"})
        assert listed.status_code == 200
        assert upstream.asked[-1].path == f"{store}/files?limit=3"


async def test_a_key_without_the_scope_is_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {}), {"endpoints": ("chat",)}) as (stage, upstream):
        answer: httpx.Response = await stage.http.post(STORES, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "endpoint_not_allowed")
        assert not upstream.asked
