"""Background responses: run without a connection, watched, cancelled, and never lost without a word."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import Message

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.server.config import ServerConfig
from ridgeline.server.responses_api.background import Replay
from ridgeline.server.responses_api.bodies import ResponseBody
from ridgeline.server.responses_api.handlers import Responses
from tests.patience import PATIENCE_S
from tests.server.responses import RESPONSES, keeping, sdk, told
from tests.server.scripted_client import Script, fail, hang, last_chunk, say
from tests.server.stage import Stage, until

ASKED: dict[str, Any] = {"input": "hello", "background": True}


def upon(signal: asyncio.Event, before: str, after: str) -> Script:
    """Says `before`, and `after` once it is told to."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        yield OutputChunk(0, before, list(before.encode()))
        await signal.wait()
        yield OutputChunk(0, after, list(after.encode()))
        yield last_chunk(0, prompt, len(before + after))

    return script


async def begin(stage: Stage, **fields: Any) -> dict[str, Any]:
    answer = await stage.post(RESPONSES, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def now(stage: Stage, id: str) -> dict[str, Any]:
    async with stage.http() as http:
        body: dict[str, Any] = (await http.get(f"{RESPONSES}/{id}")).json()
        return body


async def reached(stage: Stage, id: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (body := await now(stage, id))["status"] != status:
            await asyncio.sleep(0.005)
    return body


async def test_it_is_answered_at_once_and_found_when_it_is_done(tmp_path: Path) -> None:
    signal = asyncio.Event()
    stage = keeping(tmp_path, upon(signal, "so", " far"))
    body = await begin(stage)
    assert (body["status"], body["output"], body["background"]) == ("queued", [], True)
    assert (await reached(stage, body["id"], "in_progress"))["output"] == []
    signal.set()
    done = await reached(stage, body["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "so far"
    assert done["usage"]["output_tokens"] == 6
    async with sdk(stage) as client:
        more = await client.responses.create(model="m", input="go on", previous_response_id=body["id"])
    assert more.previous_response_id == body["id"]


async def test_a_running_one_cannot_be_continued_yet(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang())
    body = await begin(stage)
    answer = await stage.post(RESPONSES, {"input": "go on", "previous_response_id": body["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_cancelled_one_ends_and_says_so(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(after="so far"))
    body = await begin(stage)
    await reached(stage, body["id"], "in_progress")
    async with sdk(stage) as client:
        cancelled = await client.responses.cancel(body["id"])
        assert cancelled.status == "cancelled"
        assert cancelled.output_text == "so far"
        assert (await client.responses.cancel(body["id"])).status == "cancelled"
        assert (await client.responses.retrieve(body["id"])) == cancelled
    assert stage.client.aborted != []


async def test_one_that_has_not_begun_is_cancelled_too(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang())
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input="a", background=True)
        both = await asyncio.gather(*(client.responses.cancel(made.id) for _ in range(2)))
        assert [body.status for body in both] == ["cancelled"] * 2
        assert (await client.responses.retrieve(made.id)).status == "cancelled"


async def test_one_that_has_ended_is_not_cancelled_any_more(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    body = await begin(stage)
    await reached(stage, body["id"], "completed")
    async with sdk(stage) as client:
        assert (await client.responses.cancel(body["id"])).status == "completed"


async def test_one_that_ends_while_it_is_cancelled_is_told_as_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = asyncio.Event()
    stage = keeping(tmp_path, upon(signal, "so", " far"))
    body = await begin(stage)
    store = stage.served_models.part(Responses).store
    assert store is not None
    read = store.get

    async def read_before_it_ended(id: str) -> ResponseBody | None:
        found = await read(id)
        signal.set()
        await stage.served_models.part(Responses).background.ended(PATIENCE_S)
        return found

    monkeypatch.setattr(store, "get", read_before_it_ended)
    answer = await stage.post(f"{RESPONSES}/{body['id']}/cancel")
    assert answer.json()["status"] in ("completed", "cancelled")


async def test_only_background_responses_can_be_cancelled(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input="a")
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(made.id)


async def test_a_deleted_one_is_ended_and_does_not_come_back(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(after="a"))
    body = await begin(stage)
    await reached(stage, body["id"], "in_progress")
    async with stage.http() as http:
        assert (await http.delete(f"{RESPONSES}/{body['id']}")).status_code == 200
        await until(lambda: stage.client.aborted)
        assert (await http.get(f"{RESPONSES}/{body['id']}")).status_code == 404


async def test_a_failure_is_stored(tmp_path: Path) -> None:
    stage = keeping(tmp_path, fail(EngineDied("the engine died"), after="so far"))
    body = await begin(stage)
    failed = await reached(stage, body["id"], "failed")
    assert failed["error"] == {"code": "server_error", "message": "the engine died", "param": None}
    assert failed["output"][0]["content"][0]["text"] == "so far"


async def test_what_a_restart_interrupts_is_marked_as_failed(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(after="so far"))
    body = await begin(stage)
    assert stage.state is not None
    stage.state.close()  # as if the process had ended: nothing is written any more
    failed = await now(keeping(tmp_path), body["id"])
    assert failed["status"] == "failed"
    assert "restarted" in failed["error"]["message"]


async def test_it_is_marked_also_where_the_first_request_after_the_restart_is_refused(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(after="so far"))
    body = await begin(stage)
    assert stage.state is not None
    stage.state.close()
    restarted = keeping(tmp_path)
    refused = await restarted.post(RESPONSES, {"input": "go on", "previous_response_id": body["id"]})
    assert refused.status_code == 400
    assert (await now(restarted, body["id"]))["status"] == "failed"


async def test_its_stream_may_be_left_and_taken_up_where_it_was(tmp_path: Path) -> None:
    signal = asyncio.Event()
    stage = keeping(tmp_path, upon(signal, "so", " far"))
    async with stage.served() as http:
        seen = ""
        async with http.stream("POST", RESPONSES, json={**ASKED, "stream": True}) as response:
            async for text in response.aiter_text():
                seen += text
                if "output_text.delta" in seen:
                    break  # and hang up
        first = told(seen)
        id = first[0]["response"]["id"]
        assert [event["type"] for event in first[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        signal.set()
        query = {"stream": "true", "starting_after": first[-1]["sequence_number"]}
        rest = (await http.get(f"{RESPONSES}/{id}", params=query)).text
        all_of_it = (await http.get(f"{RESPONSES}/{id}", params={"stream": "true"})).text
    assert seen + rest == all_of_it
    assert told(all_of_it)[-1]["response"] == await now(stage, id)


async def test_a_long_log_is_replayed_in_parts(tmp_path: Path) -> None:
    stage = keeping(tmp_path, say("x" * 1000))
    first = await stage.post(RESPONSES, {**ASKED, "stream": True})
    (run,) = stage.served_models.part(Responses).background._ended.values()
    sent: list[bytes] = []

    async def connected() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    await Replay(run, 0, stage.config)({}, connected, send)
    assert b"".join(sent).decode() == first.text
    assert max(map(len, sent)) < len(first.content) / 2


async def test_the_sdk_takes_a_stream_up_again(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        events = await client.responses.create(model="m", input="hello", background=True, stream=True)
        kinds = [event.type async for event in events]
        assert kinds[-1] == "response.completed"
        made = await client.responses.retrieve((await begin(stage, stream=False))["id"])
        assert made.background


async def test_only_what_was_asked_to_stream_can_be_streamed(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    body = await begin(stage)
    async with stage.http() as http:
        for query, field in (({"stream": "true"}, "stream"), ({"starting_after": "3"}, "starting_after")):
            answer = await http.get(f"{RESPONSES}/{body['id']}", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_more_than_the_limit_at_once_are_answered_429(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(), config=ServerConfig(background_responses=1))
    await begin(stage)
    answer = await stage.post(RESPONSES, ASKED)
    assert answer.status_code == 429
    assert answer.headers["retry-after"]


async def test_the_limit_holds_for_those_that_come_at_once(tmp_path: Path) -> None:
    stage = keeping(tmp_path, hang(), config=ServerConfig(background_responses=2))
    answers = await asyncio.gather(*(stage.post(RESPONSES, ASKED) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]


async def test_background_without_store_is_refused(tmp_path: Path) -> None:
    answer = await keeping(tmp_path).post(RESPONSES, {**ASKED, "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


async def test_each_is_counted_once(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    body = await begin(stage)
    await reached(stage, body["id"], "completed")
    counted = [line for line in stage.metrics_text().splitlines() if "request_success_total{" in line]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0"]


async def test_one_that_the_engine_does_not_take_is_counted_once_too(tmp_path: Path) -> None:
    stage = keeping(tmp_path, fail(QueueFull(3, 1.0)))
    failed = await reached(stage, (await begin(stage))["id"], "failed")
    assert failed["error"]["code"] == "rate_limit_exceeded"
    counted = [line for line in stage.metrics_text().splitlines() if "request_refused_total{" in line]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0"]


async def test_a_server_that_ends_waits_until_what_has_ended_is_stored(tmp_path: Path) -> None:
    signal = asyncio.Event()
    stage = keeping(tmp_path, upon(signal, "so", " far"))
    body = await begin(stage)
    assert stage.state is not None
    busy = asyncio.create_task(stage.state.run(lambda connection: time.sleep(0.1)))
    signal.set()
    await stage.served_models.part(Responses).background.ended(PATIENCE_S)
    assert busy.done()
    stage.state.close()
    assert (await now(keeping(tmp_path), body["id"]))["status"] == "completed"


async def test_logs_of_ended_streams_are_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ridgeline.server.responses_api.background.MAX_KEPT_RUNS", 2)
    stage = keeping(tmp_path, say("a"))
    ids = []
    for _ in range(4):
        text = (await stage.post(RESPONSES, {**ASKED, "stream": True})).text
        ids.append(told(text)[0]["response"]["id"])
    background = stage.served_models.part(Responses).background
    await until(lambda: not any(background.running(id) for id in ids))
    assert [background.streamed(id) is not None for id in ids] == [False, False, True, True]
    with contextlib.suppress(KeyError):
        background.forget(ids[0])
