"""Checks of answers against schemas: bounded for each client, in turns, within the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ridgeline.engine.grammar import conformance
from ridgeline.server.answering import schema_checks
from ridgeline.server.config import ServerConfig
from tests.patience import PATIENCE_S
from tests.server.scripted_client import hang, say
from tests.server.stage import CHAT, HELLO, Stage, until

QUICK = {"type": "array", "uniqueItems": True}
# A validator takes longer than it may: 200,000 ways to read each text.
SLOW = {"type": "array", "items": {"type": "string", "not": {"pattern": r"^((a)\2?)*$"}}}
TEXTS = json.dumps(["a" * 26 + "!"] * 24)
EACH = {"type": "array", "contains": {"minLength": 1}}
KEYS = ("a", "b")


async def ask(http: httpx.AsyncClient, key: str, schema: Any = QUICK, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await http.post(CHAT, json={**HELLO, "guided_json": schema, **fields}, headers=headers)


@contextlib.contextmanager
def stopped(*all_asked: conformance.Questions) -> Iterator[None]:
    """The processes of these do not answer until the end."""
    pids = [asked.start().pid for asked in all_asked]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def test_slow_checks_of_one_client_do_not_delay_anothers() -> None:
    ended: list[str] = []
    async with Stage(say(TEXTS), ServerConfig(api_keys=KEYS)).http(timeout=60) as http:
        assert (await ask(http, "b", EACH)).status_code == 200  # the processes run

        async def slow() -> None:
            answer = await ask(http, "a", SLOW)
            ended.append(answer.json()["error"]["code"])

        many = [asyncio.create_task(slow()) for _ in range(8)]
        await asyncio.sleep(0.05)  # all of them are there
        assert (await ask(http, "b", EACH)).status_code == 200
        assert len(ended) <= 3  # behind neither all of them nor most
        await asyncio.gather(*many)
        assert set(ended) == {"schema_violation"}


async def test_a_check_that_does_not_answer_leaves_a_process_to_other_clients() -> None:
    async with Stage(say("[1]"), ServerConfig(api_keys=KEYS)).http(timeout=60) as http:
        assert (await ask(http, "b")).status_code == 200
        with stopped(conformance._idle.queue[-1]):  # the next one to be asked
            stuck = asyncio.create_task(ask(http, "a"))
            await until(lambda: conformance._idle.qsize() == 1)
            waits = asyncio.create_task(ask(http, "a"))  # behind the first one of its client
            assert (await ask(http, "b")).status_code == 200
            assert conformance._idle.qsize() == 1
            assert not stuck.done()
            assert not waits.done()
        assert [(await one).status_code for one in (stuck, waits)] == [200, 200]


async def test_a_check_does_not_outlast_the_requests_deadline() -> None:
    async with Stage(say("[1]"), ServerConfig(request_timeout_s=0.3)).http(timeout=60) as http:
        with stopped(*conformance._idle.queue):
            late = await ask(http, "")
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        await until(lambda: conformance._idle.qsize() == conformance.PROCESSES)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_client_has_a_bounded_number_of_answers_to_be_checked(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(schema_checks, "MOST_UNDER_WAY", 2)
    stage = Stage(hang(), ServerConfig(api_keys=KEYS))
    async with stage.http(timeout=60) as http:
        running = [asyncio.create_task(ask(http, key)) for key in ("a", "a", "b")]
        running += [asyncio.create_task(ask(http, "a", cache_salt="another tenant"))]
        await until(lambda: len(stage.client.asked) == 4)
        refused = await asyncio.wait_for(ask(http, "a", stream=stream), PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert len(stage.client.asked) == 4  # nothing was computed
        unchecked = asyncio.create_task(ask(http, "a", {"type": "boolean"}))
        await until(lambda: len(stage.client.asked) == 5)
        for one in (*running, unchecked):
            one.cancel()
        await asyncio.gather(*running, unchecked, return_exceptions=True)
        again = asyncio.create_task(ask(http, "a"))
        await until(lambda: len(stage.client.asked) == 6)
        again.cancel()
