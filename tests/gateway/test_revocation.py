"""A key that is revoked with its requests: streams end with an error event, batches are cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from tests.gateway.object_stage import batch_line, our_server, submit
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S
from tests.server.scripted_client import hang

SLOW = "mock_out60000_pace10"  # ten minutes
MESSAGES = "/v1/messages"


async def revoke(stage: Staged, end_requests: bool) -> None:
    settings = stage.parts.settings
    store = Store(settings.store, settings.state_dir)
    (key,) = stage.parts.keys.table.keys()
    await Registry(store).revoke_key(key.id, Actor("test", "127.0.0.1"), end_requests)
    await store.close()
    await stage.parts.keys.refresh()


async def rest_of_stream(
    stage: Staged, path: str, revoked: Callable[[], Awaitable[None]], model: str = SLOW
) -> str:
    """A stream's text, whose key is revoked after its first piece."""
    body = asking(model, stream=True, max_tokens=400)
    async with stage.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await revoked()
        async for piece in pieces:
            text += piece
    return text


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_running_stream_ends_with_an_error_event_and_is_booked(tmp_path: Path, path: str) -> None:
    async with staged(tmp_path) as stage:
        text = await rest_of_stream(stage, path, lambda: revoke(stage, end_requests=True))
        last = [line[6:] for line in text.splitlines() if line.startswith("data: {")][-1]
        assert "revoked" in json.loads(last)["error"]["message"]
        (row,) = await stage.rows(1)
        (book,) = stage.mock.books.values()
        await until(lambda: book.status == "aborted")
        assert (row["outcome"], row["error_code"]) == ("invalid", "revoked_api_key")
        assert row["tokens_out"] == book.tokens_out < 60_000
        assert stage.parts.upstreams.snapshot()[0].breaker == "closed"


async def test_without_the_option_a_running_stream_finishes(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        text = await rest_of_stream(
            stage, CHAT, lambda: revoke(stage, end_requests=False), "mock_out100_pace10"
        )
        assert text.rstrip().endswith("[DONE]")


async def test_a_key_that_is_revoked_already_can_be_ended_later(tmp_path: Path) -> None:
    async def twice(stage: Staged) -> None:
        await revoke(stage, end_requests=False)
        await revoke(stage, end_requests=True)

    async with staged(tmp_path) as stage:
        text = await rest_of_stream(stage, CHAT, lambda: twice(stage))
        assert "revoked_api_key" in text


async def test_a_whole_answer_that_is_under_way_is_401(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        asked = asyncio.create_task(stage.http.post(CHAT, json=asking("mock_late600000")))
        while not stage.mock.books:
            await asyncio.sleep(0.005)
        await revoke(stage, end_requests=True)
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "revoked_api_key")


async def test_a_running_batch_is_cancelled(tmp_path: Path) -> None:
    async with our_server(tmp_path, hang()) as values, staged(tmp_path, values) as stage:
        batch = (await submit(stage.http, batch_line(1))).json()
        await revoke(stage, end_requests=True)
        async with asyncio.timeout(PATIENCE_S):
            while await stage.parts.owned.pending("batch"):
                await stage.batches.look_after_all()
            while not (rows := [r for r in stage.written_rows() if r["request_id"] == batch["id"]]):
                await asyncio.sleep(0.02)
        assert (rows[0]["outcome"], rows[0]["error_code"]) == ("invalid", "revoked_api_key")
