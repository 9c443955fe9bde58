"""GET /v1/usage/{request_id}: what a request used, however it ended, for clients with a key."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ridgeline.engine.errors import InvalidRequest, RequestFailed
from ridgeline.server.config import ServerConfig
from ridgeline.server.records.usage_book import UsageBook, counted
from tests.server.scripted_client import fail, hang, say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage, until

ID = {"x-request-id": "req_7"}


async def asked(stage: Stage, request_id: str = "req_7") -> tuple[int, Any]:
    async with stage.http() as http:
        answer = await http.get(f"/v1/usage/{request_id}")
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
async def test_a_finished_request_used_what_its_answer_said(path: str) -> None:
    stage = Stage(say("four"))
    body: dict[str, Any] = {"model": "m", "max_tokens": 9} | {
        CHAT: {"messages": HELLO["messages"]},
        COMPLETIONS: {"prompt": ["ab", "cde"], "n": 2},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": HELLO["messages"]},
    }[path]
    if path == "/v1/responses":
        del body["max_tokens"]
    answer = await stage.post(path, body, headers=ID)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    status, told = await asked(stage)
    assert (status, told["status"], told["request_id"]) == (200, "finished", "req_7")
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    fresh = cached if path == "/v1/messages" else 0  # Anthropic counts what was cached beside the rest
    assert told["usage"]["prompt_tokens"] - fresh == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert told["usage"]["completion_tokens"] == usage.get("completion_tokens", usage.get("output_tokens"))
    assert told["usage"]["total_tokens"] == (
        told["usage"]["prompt_tokens"] + told["usage"]["completion_tokens"]
    )


async def test_a_request_that_its_client_left_used_what_was_computed_until_then() -> None:
    stage = Stage(hang(after="seven b"))
    async with stage.served() as http:
        async with http.stream("POST", CHAT, json=HELLO | {"stream": True}, headers=ID) as answer:
            await anext(answer.aiter_raw())
            running = (await http.get("/v1/usage/req_7")).json()
            assert (running["status"], running["usage"]["completion_tokens"]) == ("running", 7)
        await until(lambda: stage.client.aborted)
        ended = (await http.get("/v1/usage/req_7")).json()
    assert ended["status"] == "aborted"
    assert ended["usage"]["completion_tokens"] == 7
    assert ended["usage"]["prompt_tokens"] == len(stage.client.asked[0]["prompt"])


async def test_a_whole_answer_that_nobody_waits_for_is_counted_too() -> None:
    said = asyncio.Event()
    stage = Stage(hang(after="three", said=said))
    async with stage.served() as http:
        asking = asyncio.create_task(http.post(CHAT, json=HELLO, headers=ID))
        await until(said.is_set)
        asking.cancel()
        await until(lambda: stage.client.aborted)
        ended = (await http.get("/v1/usage/req_7")).json()
    assert (ended["status"], ended["usage"]["completion_tokens"]) == ("aborted", 5)


async def test_a_request_that_failed_in_the_engine_says_so_with_its_tokens() -> None:
    stage = Stage(fail(RequestFailed("as told"), after="abc"))
    assert (await stage.post(CHAT, HELLO, headers=ID)).status_code == 500
    _, told = await asked(stage)
    assert (told["status"], told["usage"]["completion_tokens"]) == ("failed", 3)


async def test_a_request_that_was_refused_is_not_known() -> None:
    stage = Stage(fail(InvalidRequest("prompt", "as told")))
    assert (await stage.post(CHAT, HELLO, headers=ID)).status_code == 400
    status, told = await asked(stage)
    assert (status, told["error"]["code"]) == (404, "not_found")


async def test_an_unknown_request_is_told_from_when_on_all_are_known() -> None:
    before = time.time()
    stage = Stage()
    async with stage.http() as http:
        answer = await http.get("/v1/usage/nobody")
    assert answer.status_code == 404
    assert before - 0.01 <= float(answer.headers["x-ridgeline-usage-since"]) <= time.time() + 0.01
    book = UsageBook(kept=1)
    book.end(book.begin("a", lambda: counted(1)), 200)
    ended = time.time()
    book.end(book.begin("b", lambda: counted(1)), 200)  # `a` is forgotten
    assert book.known_since <= ended
    assert book.known_since > before


async def test_a_key_is_needed_as_for_other_paths() -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    assert (await asked(stage))[0] == 401
    async with stage.http(headers={"authorization": "Bearer secret"}) as http:
        await http.post(CHAT, json=HELLO, headers=ID)
        assert (await http.get("/v1/usage/req_7")).status_code == 200


def test_the_oldest_leave_and_an_id_that_comes_again_stands_for_its_last_request() -> None:
    book = UsageBook(kept=3)
    for number in range(4):
        book.end(book.begin(f"r{number}", lambda number=number: counted(number)), 200)
    assert book.find("r0") is None
    earlier = book.begin("r1", lambda: counted(50, 5))
    later = book.begin("r1", lambda: counted(60, 6))
    book.end(earlier, 499)
    found = book.find("r1")
    assert found is not None
    assert (found.status, found.usage.prompt_tokens) == ("running", 60)
    book.end(later, 500)
    found = book.find("r1")
    assert found is not None
    assert (found.status, found.usage.total_tokens) == ("failed", 66)
    book.end(book.begin("r4", lambda: counted(1)), 200)
    assert [book.find(f"r{number}") is None for number in range(5)] == [True, False, True, False, False]
