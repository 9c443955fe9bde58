"""What the bench does before a run: it looks at the server, and refuses what makes no sense."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.lab.bench.config import ClosedLoop, RequestDeadlines
from ridgeline.lab.bench.reports.text_summary import text_of
from ridgeline.lab.bench.run import run_bench
from ridgeline.lab.errors import BadInput, LabError
from tests.conftest import free_port
from tests.lab.bench.faulty_server import Call, faulty_server
from tests.lab.bench.test_bench_run import at_once, config, good, ran


async def test_no_server_is_one_line_of_advice() -> None:
    with pytest.raises(LabError, match="cannot reach"):
        await run_bench(config(f"http://127.0.0.1:{free_port()}", at_once(1), ClosedLoop(1)))


async def test_a_name_that_no_resolver_can_be_asked_for_is_one_line_too() -> None:
    with pytest.raises(LabError, match="cannot be resolved"):
        await run_bench(config("http://a..b:80", at_once(1), ClosedLoop(1)))


async def test_a_list_of_models_that_is_no_text_is_no_list() -> None:
    async with faulty_server(good) as (_, server):
        server.models = b'{"data":[{"id":"\xff\xfe"}]}'
        with pytest.raises(LabError, match="--model"):
            await run_bench(config(server.url, at_once(1), ClosedLoop(1)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "ftp://x"}, "not a server's address"),
        ({"url": "http://h:99999"}, "port"),
        ({"url": "http://[::1"}, "not a server's address"),
        ({"url": ""}, "not a server's address"),
        ({"url": "http://me:secret@h"}, "--api-key"),
        ({"usd_per_hour": 0.0}, "usd_per_hour"),
        ({"traffic": at_once(0)}, "nothing to send"),
        ({"mode": ClosedLoop(0)}, "at least 1"),
        ({"duration_s": -1.0}, "above 0"),
        ({"deadlines": RequestDeadlines(between_s=0.0)}, "between_s"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        await run_bench(replace(config("http://127.0.0.1:1", at_once(1), ClosedLoop(1)), **changes))


async def test_fields_that_a_server_refuses_are_left_out_and_told() -> None:
    """As a hosted server does with names it does not know."""

    async def strict(call: Call) -> None:
        assert "ignore_eos" not in call.body
        await call.answer(call.body["max_completion_tokens"])

    async with faulty_server(strict) as (_, server):

        async def refusing(call: Call) -> None:
            if "ignore_eos" in call.body:
                await call.reply(400, b'{"error":{"message":"Unrecognized argument: ignore_eos"}}')
            elif "max_tokens" in call.body:
                await call.reply(400, b'{"error":{"message":"Use max_completion_tokens instead"}}')
            else:
                await strict(call)

        server.behave, server.is_looked_at = refusing, False
        result = await run_bench(config(server.url, at_once(3), ClosedLoop(1), api="completions"))
    assert result.summary.ok == 3
    assert result.settings["refused_fields"] == ["ignore_eos"]


async def test_a_server_that_refuses_running_usage_is_still_asked_for_the_sum() -> None:
    asked: list[Any] = []

    async def older(call: Call) -> None:
        if "continuous_usage_stats" in call.body["stream_options"]:
            await call.reply(400, b'{"error":{"message":"extra inputs are not permitted"}}')
        else:
            asked.append(call.body)
            await call.answer(call.body["max_tokens"])

    async with faulty_server(older) as (_, server):
        server.models, server.is_looked_at = b'{"data":[{"id":"m","owned_by":"vllm"}]}', False
        result = await run_bench(config(server.url, at_once(2), ClosedLoop(1)))
    assert result.settings["refused_fields"] == ["continuous_usage_stats"]
    assert all(body["stream_options"] == {"include_usage": True} for body in asked)
    assert all("cache_salt" in body for body in asked)  # what was not refused is kept


async def test_a_server_that_hangs_on_questions_before_the_run_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(call: Call) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr("ridgeline.lab.bench.client.target.TRIAL_TIMEOUT_S", 0.2)
    async with faulty_server(hang) as (_, server):
        with pytest.raises(LabError, match="before the run"):
            await run_bench(replace(config(server.url, at_once(1), ClosedLoop(1)), vocabulary=None))
        server.is_looked_at = False
        with pytest.raises(LabError, match="first small request"):
            await run_bench(config(server.url, at_once(1), ClosedLoop(1)))


async def test_requests_beyond_the_servers_context_are_told_before_they_fail() -> None:
    async with faulty_server(good) as (_, server):
        server.models = b'{"data":[{"id":"m","max_model_len":6}]}'
        result = await run_bench(config(server.url, at_once(2), ClosedLoop(1)))
    assert "2 requests need more than the server's context of 6" in text_of(result)


async def test_a_key_is_sent_and_a_missing_one_is_named() -> None:
    keys: list[str] = []

    async def keyed(call: Call) -> None:
        keys.append(call.head.partition("authorization: ")[2].partition("\r\n")[0])
        await call.answer(3)

    await ran(keyed, at_once(1), ClosedLoop(1), api_key="SeCrEt")
    assert keys == ["bearer secret"]  # the test's server lowers heads

    async with faulty_server(good) as (_, server):
        server.models_status = 401
        with pytest.raises(LabError, match="--api-key"):
            await run_bench(config(server.url, at_once(1), ClosedLoop(1)))
