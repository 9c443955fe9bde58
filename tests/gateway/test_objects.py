"""Files, batches and stored responses, before our real server: only their owner sees them."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from ridgeline.gateway.offload.offload import PROCESSES
from tests.gateway.object_stage import batch_line, before_our_server, ended, upload
from tests.gateway.scripted_upstream import Asked, ScriptedUpstream, always, whole
from tests.gateway.stage import CHAT, staged
from tests.gateway.test_trust import scripted
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S


async def test_a_batch_runs_its_owner_reads_it_and_what_it_used_is_booked_once(tmp_path: Path) -> None:
    async with before_our_server(tmp_path) as stage:
        content = "\n".join(batch_line(n) for n in range(3))
        file = (await upload(stage.http, content)).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        made = await stage.http.post("/v1/batches", json=body)
        assert made.status_code == 200, made.text
        batch = await ended(stage.http, made.json()["id"])
        assert batch["status"] == "completed"
        answers = (await stage.http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        used = [json.loads(line)["response"]["body"]["usage"] for line in answers.splitlines()]
        await stage.batches.look_after_all()
        await stage.batches.look_after_all()
        async with asyncio.timeout(PATIENCE_S):
            while not (rows := [r for r in stage.written_rows() if r["request_id"] == batch["id"]]):
                await asyncio.sleep(0.02)
        (row,) = rows
        assert row["tokens_in"] == sum(one["prompt_tokens"] for one in used)
        assert row["tokens_out"] == sum(one["completion_tokens"] for one in used)
        assert row["cost_pusd"] == row["tokens_in"] * 1_000_000 + row["tokens_out"] * 2_000_000
        assert row["key_id"].startswith("key_")
        assert row["model"] == "public"


async def test_a_batch_takes_the_largest_metadata_of_openai_and_no_body_beyond_64_kib(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"id": "x", "object": "file"})) as (stage, upstream):
        body = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
        body |= {"metadata": {f"{n:064}": "я" * 512 for n in range(16)}}  # 52 kB, as its escapes are ASCII
        assert (await stage.http.post("/v1/batches", content=json.dumps(body))).status_code == 404
        body |= {f"field_{n}": 0 for n in range(2_000)}
        refused = await stage.http.post("/v1/batches", content=json.dumps(body))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert not upstream.asked


async def test_the_guard_checks_a_batch_in_its_tenants_own_queue(tmp_path: Path) -> None:
    guards = [{"name": "mail", "redact": ("email",)}]
    answer = always(200, {"id": "file-1", "object": "file"})
    async with scripted(tmp_path, answer, {"guard": "mail"}, guards=guards) as (stage, _):
        offload, key = stage.parts.offload, stage.parts.keys.table.lookup(stage.secret)
        await stage.parts.owned.remember("file-1", key.tenant, "up", "file", {"model": "open"})
        offload.start()
        await until(lambda: len(offload._idle) == PROCESSES)
        for process in offload._alive:  # the job stays where it can be seen
            process.send_signal(signal.SIGSTOP)
        body = {"input_file_id": "file-1", "endpoint": CHAT, "metadata": {"note": "x" * 4096}}
        asked = asyncio.create_task(stage.http.post("/v1/batches", json=body))
        await until(lambda: bool(offload._busy))
        assert list(offload._busy) == [key.tenant]
        asked.cancel()


async def test_the_guard_checks_the_names_of_a_batchs_lines_in_their_tenants_own_queue(
    tmp_path: Path,
) -> None:
    guards = [{"name": "mail", "redact": ("email",)}]
    async with scripted(tmp_path, always(200, {}), {"guard": "mail"}, guards=guards) as (stage, _):
        offload, key = stage.parts.offload, stage.parts.keys.table.lookup(stage.secret)
        offload.start()
        await until(lambda: len(offload._idle) == PROCESSES)
        for process in offload._alive:  # the job stays where it can be seen
            process.send_signal(signal.SIGSTOP)
        line = batch_line(1, custom_id="x" * 4096, body={"model": "open"})
        asked = asyncio.create_task(upload(stage.http, line))
        await until(lambda: bool(offload._busy))
        assert list(offload._busy) == [key.tenant]
        asked.cancel()


async def test_a_batch_whose_connection_dies_is_not_made_twice(tmp_path: Path) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/files":
            writer.write(whole(200, {"id": "file-1", "object": "file"}))
        else:  # made, and the answer is lost
            writer.transport.abort()

    async with ScriptedUpstream(answer) as upstream:
        values = {
            "upstreams": [{"name": "a", "kind": "openai", "url": upstream.url}],
            "models": [{"name": "public", "targets": ("a/m",)}],
        }
        async with staged(tmp_path, values) as stage:
            file = (await upload(stage.http, batch_line(1))).json()
            body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            made = await stage.http.post("/v1/batches", json=body)
            assert (made.status_code, made.json()["error"]["code"]) == (502, "upstream_failed")
            assert "may have been executed" in made.json()["error"]["message"]
            assert [one.path for one in upstream.asked] == ["/v1/files", "/v1/batches"]


async def test_somebody_elses_objects_do_not_exist(tmp_path: Path) -> None:
    async with before_our_server(tmp_path) as stage:
        file = (await upload(stage.http, batch_line(1))).json()
        _, other = await stage.new_key(name="other")
        async with stage.client(other) as stranger:
            assert (await stranger.get(f"/v1/files/{file['id']}")).status_code == 404
            assert (await stranger.get(f"/v1/files/{file['id']}/content")).status_code == 404
            assert (await stranger.delete(f"/v1/files/{file['id']}")).status_code == 404
            assert (await stranger.get("/v1/files")).json()["data"] == []
            body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            refused = await stranger.post("/v1/batches", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")
        assert [one["id"] for one in (await stage.http.get("/v1/files")).json()["data"]] == [file["id"]]
        assert (await stage.http.delete(f"/v1/files/{file['id']}")).status_code == 200
        assert (await stage.http.get(f"/v1/files/{file['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (batch_line(1) + "\n{", 400, "line 2"),
        (batch_line(1, body={"model": "secret"}), 403, "model"),
        (batch_line(1) + "\n" + batch_line(2, body={"model": "other"}), 400, "one model"),
        (batch_line(1, url="/v1/files"), 400, "url"),
        (batch_line(1, method="DELETE"), 400, "url"),
        ("\n\n", 400, "no requests"),
    ],
)
async def test_a_batch_may_hold_only_what_its_key_may_ask(
    tmp_path: Path, content: str, status: int, says: str
) -> None:
    async with before_our_server(tmp_path, models=("public",)) as stage:
        refused = await upload(stage.http, content)
        assert (refused.status_code, refused.json()["error"]["message"].count(says) > 0) == (status, True)


async def test_a_stored_response_is_continued_by_its_owner_alone(tmp_path: Path) -> None:
    async with before_our_server(tmp_path) as stage:
        first = (await stage.http.post("/v1/responses", json={"model": "public", "input": "hello"})).json()
        again = {"model": "public", "input": "more", "previous_response_id": first["id"]}
        assert (await stage.http.post("/v1/responses", json=again)).status_code == 200
        assert (await stage.http.get(f"/v1/responses/{first['id']}")).json()["id"] == first["id"]
        _, other = await stage.new_key(name="other")
        async with stage.client(other) as stranger:
            refused = await stranger.post("/v1/responses", json=again)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
            assert (await stranger.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_a_streamed_response_is_its_owners_too(tmp_path: Path) -> None:
    async with before_our_server(tmp_path) as stage:
        text = (
            await stage.http.post("/v1/responses", json={"model": "public", "input": "hi", "stream": True})
        ).text
        made = next(json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: "))
        assert (await stage.http.get(f"/v1/responses/{made['response']['id']}")).status_code == 200
