"""Ids inside a body are their owner's alone, wherever they stand; lists show what a tenant has made."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.objects.references import LONGEST_PLACE, references
from tests.gateway.scripted_upstream import Asked, whole
from tests.gateway.stage import CHAT, Staged
from tests.gateway.test_trust import always, batch_line, scripted, upload

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "hi"}, fields]}]


FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": part(type="file", file={"file_id": "X"})}, "messages[0].content[1].file.file_id"),
    (CHAT, {"messages": part(type="file", file={"FILE_ID": "X"})}, "messages[0].content[1].file.FILE_ID"),
    (RESPONSES, {"input": part(type="input_file", file_id="X")}, "input[0].content[1].file_id"),
    (RESPONSES, {"input": part(type="input_image", file_id="X")}, "input[0].content[1].file_id"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "X"}]}, "input[0].id"),
    (RESPONSES, {"input": [{"id": "X"}]}, "input[0].id"),
    (RESPONSES, {"input": [{"id": "X", "type": None}]}, "input[0].id"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "output": [{"type": "input_file", "file_id": "X"}]}]},
        "input[0].output[0].file_id",
    ),
    (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "file_search", "vector_store_ids": ["X"]}]},
        "tools[0].vector_store_ids",
    ),
    (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "code_interpreter", "container": "X"}]},
        "tools[0].container",
    ),
    (
        RESPONSES,
        {
            "input": "hi",
            "tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["X"]}}],
        },
        "tools[0].container.file_ids",
    ),
    (RESPONSES, {"input": "hi", "previous_response_id": "X"}, "previous_response_id"),
    (
        RESPONSES,
        {"input": "hi", "prompt": {"id": "p", "variables": {"a": {"type": "input_file", "file_id": "X"}}}},
        "prompt.variables.a.file_id",
    ),
    (
        MESSAGES,
        {"max_tokens": 1, "messages": part(type="document", source={"type": "file", "file_id": "X"})},
        "messages[0].content[1].source.file_id",
    ),
    (
        MESSAGES,
        {"max_tokens": 1, "messages": part(type="container_upload", file_id="X")},
        "messages[0].content[1].file_id",
    ),
    (MESSAGES, {"max_tokens": 1, "messages": [], "container": "X"}, "container"),
    (MESSAGES, {"max_tokens": 1, "messages": [], "container": {"id": "X"}}, "container"),
]


def tenant_of(stage: Staged) -> str:
    key = stage.parts.keys.table.lookup(stage.secret)
    assert key is not None
    return key.tenant


async def test_an_id_that_is_not_the_tenants_is_404_that_names_its_field(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {})) as (stage, upstream):
        for kind in ("file", "response"):
            await stage.parts.owned.remember(f"{kind}-of-another", "another", "up", kind, {})
        for path, fields, field in FOREIGN:
            for id in ("file-of-another", "response-of-another", "file-never-made"):
                body = json.dumps({"model": "m", **fields}).replace('"X"', json.dumps(id))
                json_type = {"content-type": "application/json"}
                refused = await stage.http.post(path, content=body, headers=json_type)
                assert (refused.status_code, field in refused.text) == (404, True), (field, refused.text)
        assert not upstream.asked


async def test_an_id_written_with_escapes_and_one_in_a_large_body_are_found(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {})) as (stage, upstream):
        escaped = b'{"model": "m", "input": [{"type": "input_file", "file\\u005fid": "x"}]}'
        filler = {"role": "user", "content": "y" * 100_000}
        large = {"model": "m", "input": [filler, {"type": "input_file", "file_id": "x"}]}
        for body in (escaped, json.dumps(large).encode()):
            json_type = {"content-type": "application/json"}
            refused = await stage.http.post(RESPONSES, content=body, headers=json_type)
            assert refused.status_code == 404, refused.text
        assert not upstream.asked


async def test_a_tenants_own_file_may_be_named_and_decides_where_the_request_goes(tmp_path: Path) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, {"id": "resp_1", "output": []}))

    async with scripted(tmp_path, answer) as (stage, upstream):
        await stage.parts.owned.remember("file-1", tenant_of(stage), "up", "file", {})
        await stage.parts.owned.remember("file-2", tenant_of(stage), "elsewhere", "file", {})
        body = {"model": "m", "input": part(type="input_file", file_id="file-1")}
        assert (await stage.http.post(RESPONSES, json=body)).status_code == 200
        assert len(upstream.asked) == 1
        body = {"model": "m", "input": part(type="input_file", file_id="file-2")}
        assert "without the model" in (await stage.http.post(RESPONSES, json=body)).text


async def test_a_line_of_a_batch_names_no_id_of_another_tenant(tmp_path: Path) -> None:
    async with scripted(tmp_path, always(200, {"id": "file-new"})) as (stage, upstream):
        await stage.parts.owned.remember("file-1", "another", "up", "file", {})
        said = {"model": "open", "messages": part(type="file", file={"file_id": "file-1"})}
        refused = await upload(stage.http, line=batch_line() + b"\n" + batch_line(body=said))
        assert refused.status_code == 404
        assert "line 2: messages[0].content[1].file.file_id" in refused.json()["error"]["message"]
        assert not upstream.asked


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("chat", {"messages": [], "metadata": {"file_id": "mine"}}),
        ("chat", {"tools": [{"function": {"parameters": {"properties": {"file_id": {"type": "string"}}}}}]}),
        ("chat", {"messages": [{"tool_calls": [{"function": {"arguments": '{"file_id": "a"}'}}]}]}),
        ("messages", {"messages": [{"content": [{"type": "tool_use", "input": {"file_id": "a"}}]}]}),
        ("responses", {"input": [{"type": "message", "id": "msg_1", "content": "the file_id is x"}]}),
        (
            "responses",
            {"input": "hi", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        ),
        ("embeddings", {"input": ['{"file_id": "a"}']}),
    ],
)
def test_words_of_the_client_are_no_ids(kind: str, fields: dict[str, Any]) -> None:
    assert references(kind, read_fields(json.dumps(fields).encode())) == []


def test_the_place_of_an_id_under_a_long_name_is_cut() -> None:
    fields = read_fields(json.dumps({"n" * 10_000: [{"file_id": "a"}] * 2}).encode())
    assert [(len(one.field), one.id) for one in references("chat", fields)] == [(LONGEST_PLACE, "a")] * 2


def test_a_body_with_too_many_ids_is_refused_before_their_places_fill_the_memory() -> None:
    fields = read_fields(json.dumps({"n" * 20_000: [{"file_id": "a"}] * 5_000}).encode())
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="more than 1000 objects"):
            references("chat", fields)
        assert tracemalloc.get_traced_memory()[1] < 10e6  # 100 MB with a place for each id
    finally:
        tracemalloc.stop()


async def test_a_list_of_files_is_the_tenants_own_by_pages_and_asks_no_upstream(tmp_path: Path) -> None:
    made = 0

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        writer.write(whole(200, {"id": f"file-{made}", "object": "file", "bytes": 1, "purpose": "batch"}))

    async with scripted(tmp_path, answer) as (stage, upstream):
        _, other = await stage.new_key(name="other")
        for number in range(7):
            assert (await upload(stage.http)).status_code == 200
            if number % 2:
                async with stage.client(other) as http:
                    await upload(http)
        asked, seen, after = len(upstream.asked), [], ""
        while True:
            listed = (await stage.http.get(f"/v1/files?limit=3{after}")).json()
            seen += [one["id"] for one in listed["data"]]
            assert listed["data"][0]["object"] == "file"
            assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], seen[-1])
            if not listed["has_more"]:
                break
            after = f"&after={seen[-1]}"
        assert seen == [f"file-{number}" for number in (10, 8, 7, 5, 4, 2, 1)]
        assert len(upstream.asked) == asked
        refused = await stage.http.get("/v1/files?after=file-3")  # another tenant's
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


async def test_a_list_of_batches_asks_only_for_those_that_may_have_changed(tmp_path: Path) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        name = asked.path.rpartition("/")[2]
        status = "completed" if name == "batch-1" else "in_progress"
        if name == "batch-3":
            writer.write(whole(404, {"error": {"message": "gone"}}))
        else:
            writer.write(whole(200, {"id": name, "status": status, "output_file_id": f"out-{name}"}))

    async with scripted(tmp_path, answer) as (stage, upstream):
        for number in range(1, 4):
            await stage.parts.owned.remember(f"batch-{number}", tenant_of(stage), "up", "batch", {})
            await asyncio.sleep(0.002)
        await stage.parts.owned.settled("batch-1")
        for asks in (3, 2):  # the first has ended, and is known from then on
            upstream.asked.clear()
            listed = (await stage.http.get("/v1/batches")).json()
            assert [one["id"] for one in listed["data"]] == ["batch-2", "batch-1"]
            assert len(upstream.asked) == asks
        assert (await stage.parts.owned.owner("out-batch-1")).tenant == tenant_of(stage)
