"""What a client writes so that the gateway reads one thing and the upstream another: it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.keys import Limits, Team
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from tests.gateway.scripted_upstream import Answer, ScriptedUpstream, always
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.patience import PATIENCE_S

JSON = {"content-type": "application/json"}
ANSWER = {"id": "x", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
TRANSCRIPTIONS = "/v1/audio/transcriptions"


@contextlib.asynccontextmanager
async def scripted(
    tmp_path: Path, answer: Answer, key: Mapping[str, Any] | None = None, **values: Any
) -> AsyncIterator[tuple[Staged, ScriptedUpstream]]:
    async with ScriptedUpstream(answer) as upstream:
        sections = {
            "upstreams": [{"name": "up", "kind": "openai", "url": upstream.url, "probe_s": 0.0}],
            "models": [{"name": "*", "targets": ("up/*",)}],
            **values,
        }
        async with staged(tmp_path, sections, key) as stage:
            yield stage, upstream


def multipart(*parts: tuple[str, bytes]) -> dict[str, Any]:
    """A request's content and headers, each part's head as it is given."""
    pieces = [b"--B\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in parts]
    return {
        "content": b"".join([*pieces, b"--B--\r\n"]),
        "headers": {"content-type": "multipart/form-data; boundary=B"},
    }


def named(name: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"m\\u006fdel": "secret", "model": "open", "messages": []}',
        b'{"messages": ["hidden"], "model": "open", "messages": []}',
    ],
)
async def test_a_field_that_stands_twice_reaches_the_upstream_once(tmp_path: Path, body: bytes) -> None:
    async with scripted(tmp_path, always(200, ANSWER), {"models": ("open",)}) as (stage, upstream):
        assert (await stage.http.post(CHAT, content=body, headers=JSON)).status_code == 200
        sent = upstream.asked[0]
        pairs = json.loads(sent.body, object_pairs_hook=list)
        assert sorted(pairs) == [("messages", []), ("model", "open")]


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        (b'{"model": "open", "MODEL": "secret"}', {}, 400, "MODEL"),
        (b'{"model": "open", "messages": [], "Stream": true}', {}, 400, "Stream"),
        ('{"model": "open", "messages": [], "\u017ftream": true}'.encode(), {}, 400, "\u017ftream"),
        (b'{"model": "open", "messages": [], "max_to\\u212Aens": 9}', {}, 400, "max_to\u212aens"),
        (b'{"model": "open", "messages": [], "max_tokens": 1, "Max_Tokens": 2000}', {}, 400, "Max_Tokens"),
        (b'{"model": "open", "Messages": []}', {}, 400, "Messages"),
        (
            b'{"model": "open", "stream": true, "stream_options": {"INCLUDE_USAGE": 0}}',
            {},
            400,
            "stream_options.INCLUDE_USAGE",
        ),
        (b'{"model": "open\\u0000", "messages": []}', {}, 400, "model"),
        (b'{"model": "%b", "messages": []}' % (b"a" * 300), {}, 400, "model"),
        (b'{"model": "open", "messages": []}', {"content-encoding": "gzip"}, 415, None),
        (b'{"model": "open", "messages": []}', {"anthropic-beta": "x" * 600}, 400, None),
        (b'{"model": "open", "n": 5000, "messages": []}', {}, 400, "n"),
        (b'{"model": "open\xff", "messages": []}', {}, 400, "model"),
    ],
)
async def test_what_others_might_read_otherwise_is_refused_and_not_forwarded(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, param: str | None
) -> None:
    key = {"limits": Limits(tokens_per_minute=10**9)}
    async with scripted(tmp_path, always(200, ANSWER), key) as (stage, upstream):
        answer = await stage.http.post(CHAT, content=body, headers=JSON | headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not upstream.asked
        assert stage.parts.upstreams.snapshot()[0].inflight == 0


async def test_several_answers_of_one_request_are_all_reserved(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(tokens_per_minute=1000)}) as stage:
        refused = await stage.http.post(CHAT, json=asking("mock", max_tokens=300, n=4))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_limit")


async def test_two_tenants_never_share_an_idempotency_key(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, ANSWER)) as (stage, upstream):
        _, other = await stage.new_key(name="other")
        for http in (stage.http, stage.http, stage.client(other)):
            await http.post(CHAT, json=asking(), headers={"idempotency-key": "order 17"})
        first, again, others = [one.headers["idempotency-key"] for one in upstream.asked]
        assert first == again != others
        assert "17" not in (first, others)


@pytest.mark.parametrize(
    "second",
    [
        named("y", '; name="model"'),
        named("model_", "; name*=utf-8''model"),
        named("y") + '\r\nx: name="model"',
    ],
)
async def test_a_form_cannot_name_another_model_to_the_upstream_than_to_us(
    tmp_path: Path, second: str
) -> None:
    async with scripted(tmp_path, always(200, {"text": "hi"}), {"models": ("open",)}) as (stage, upstream):
        form = multipart(
            (named("model"), b"open"), (second, b"secret"), (named("file", '; filename="a"'), b"RIFF")
        )
        assert (await stage.http.post(TRANSCRIPTIONS, **form)).status_code == 200
        (sent,) = upstream.asked
        assert b'name="model"\r\n\r\nopen' in sent.body
        assert sent.body.count(b'name="model"') == 1
        assert b"name*" not in sent.body
        assert "boundary=B" not in sent.headers["content-type"]


async def test_a_field_that_may_stand_twice_does(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"text": "hi"})) as (stage, upstream):
        every = "timestamp_granularities[]"
        form = multipart(
            (named("model"), b"w"), (named(every), b"word"), (named(every), b"segment"), (named("file"), b"x")
        )
        assert (await stage.http.post(TRANSCRIPTIONS, **form)).status_code == 200
        assert upstream.asked[0].body.count(every.encode()) == 2


def batch_line(model: str = "open", **fields: Any) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body, **fields}).encode()


async def upload(http: httpx.AsyncClient, *more: tuple[str, bytes], line: bytes = b"") -> httpx.Response:
    file = (named("file", '; filename="in.jsonl"'), line or batch_line())
    return await http.post("/v1/files", **multipart((named("purpose"), b"batch"), file, *more))


async def new_team(stage: Staged) -> str:
    store = Store(stage.parts.settings.store, stage.parts.settings.state_dir)
    try:
        made = await Registry(store).create_team(lambda id: Team(id, "t"), Actor("test", "127.0.0.1"))
        return made.team.id
    finally:
        await store.close()


async def test_an_upload_holds_only_what_was_read(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"id": "file-1"}), {"models": ("open",)}) as (stage, upstream):
        hidden = (named("x", '; name="file"; filename="b"'), batch_line("secret"))
        refused = await upload(stage.http, hidden)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x")
        assert not upstream.asked


async def test_a_key_makes_no_batch_of_a_file_that_it_could_not_have_put_there(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"id": "file-1"})) as (stage, upstream):
        team = await new_team(stage)
        _, wide = await stage.new_key(name="wide", team=team)
        assert (await upload(stage.client(wide))).status_code == 200
        body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        for scope, code in (
            ({"models": ("other",)}, "model_not_allowed"),
            ({"endpoints": ("batches",)}, "endpoint_not_allowed"),
        ):
            _, secret = await stage.new_key(name=code, team=team, **scope)
            refused = await stage.client(secret).post("/v1/batches", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
        assert len(upstream.asked) == 1


async def test_a_batch_whose_client_has_left_is_remembered_all_the_same(tmp_path: Path) -> None:
    going_on = asyncio.Event()

    async def answer(asked: Any, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/batches":
            await going_on.wait()
            return await always(200, {"id": "batch-1"})(asked, writer)
        return await always(200, {"id": "file-1"})(asked, writer)

    async with scripted(tmp_path, answer) as (stage, upstream):
        await upload(stage.http)
        body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        making = asyncio.create_task(stage.http.post("/v1/batches", json=body))
        while len(upstream.asked) < 2:
            await asyncio.sleep(0.005)
        making.cancel()
        await asyncio.sleep(0.05)
        going_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while not await stage.parts.owned.pending("batch"):
                await asyncio.sleep(0.01)


async def test_a_list_that_the_upstream_cannot_complete_is_not_a_shorter_one(tmp_path: Path) -> None:
    for answer in (always(200, b"<html>"), always(403, {})):
        async with scripted(tmp_path / str(id(answer)), answer) as (stage, _):
            key = stage.parts.keys.table.lookup(stage.secret)
            assert key is not None
            tenant = key.tenant
            await stage.parts.owned.remember("batch-1", tenant, "up", "batch", {})
            assert (await stage.http.get("/v1/batches")).status_code == 502


GUARD = {"guards": [{"name": "default", "redact": ("email",)}]}


async def test_a_guard_sees_all_texts_of_a_batch(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"id": "file-1"}), **GUARD) as (stage, upstream):
        refused = await upload(stage.http, line=batch_line(custom_id="anna@example.org"))
        assert refused.status_code == 400
        assert (await upload(stage.http)).status_code == 200
        body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        await stage.http.post("/v1/batches", json={**body, "metadata": {"who": "anna@example.org"}})
        sent = upstream.asked[-1].json()
        assert sent["input_file_id"] == "file-1"
        assert "anna" not in json.dumps(sent)
