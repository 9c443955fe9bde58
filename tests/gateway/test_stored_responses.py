"""A stored response belongs to its tenant, however the bytes of its stream arrive."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.scripted_upstream import Asked, whole
from tests.gateway.test_endings import HEAD, chunk
from tests.gateway.test_trust import scripted

CREATED = (
    'event: response.created\ndata: {"type":"response.created",'
    '"response":{"id":"resp_of_one","status":"in_progress"}}\n\n'
)
ENDED = (
    'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_of_one",'
    '"status":"completed","usage":{"input_tokens":3,"output_tokens":2}}}\n\n'
)


@pytest.mark.parametrize(
    "pieces",
    [
        [": keep-alive\n\n", CREATED, ENDED],
        [CREATED[:9], CREATED[9:60], CREATED[60:], ENDED],
        [": ke", "ep-alive\n", "\n" + CREATED[:30], CREATED[30:90], CREATED[90:] + ENDED],
        ["retry: 100\n\n", CREATED + ENDED],
    ],
    ids=["comment", "split", "both", "field"],
)
async def test_a_streamed_response_keeps_its_owner_however_its_first_event_arrives(
    tmp_path: Path, pieces: list[str]
) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.method == "GET":
            writer.write(whole(200, {"id": "resp_of_one"}))
            return
        writer.write(HEAD)
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.02)  # each piece is a separate read
        writer.write(b"0\r\n\r\n")

    async with scripted(tmp_path, answer) as (stage, _):
        body = {"model": "m", "input": "hi", "stream": True}
        text = (await stage.http.post("/v1/responses", json=body)).text
        assert text == "".join(pieces)
        (row,) = await stage.rows(1)
        assert (row["tokens_in"], row["tokens_out"]) == (3, 2)
        assert (await stage.http.get("/v1/responses/resp_of_one")).status_code == 200
        _, other = await stage.new_key(name="other")
        async with stage.client(other) as stranger:
            assert (await stranger.get("/v1/responses/resp_of_one")).status_code == 404
            again = {"model": "m", "input": "more", "previous_response_id": "resp_of_one"}
            assert (await stranger.post("/v1/responses", json=again)).status_code == 404
