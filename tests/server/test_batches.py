"""/v1/batches: every line of a file is asked once and answered once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.server.batches import answering
from ridgeline.server.batches.journal import Journal
from ridgeline.server.batches.lines import MAX_ERRORS
from ridgeline.server.batches.store import Finished
from ridgeline.server.records.state import StateStore
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S
from tests.server.batch_stage import HELLO, Server, line, lines, taking_turns
from tests.server.scripted_client import fail, hang, say
from tests.server.stage import CHAT, COMPLETIONS, until


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path / "state")
    yield store
    store.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(answering, "LONGEST_PAUSE_S", 0.01)


class TestCourse:
    async def test_every_line_is_answered_once_in_the_order_of_the_input(self, state: StateStore) -> None:
        async with Server(state) as server:
            batch = await server.create(lines(30), metadata={"night": "1"})
            assert (batch["status"], batch["metadata"]) == ("validating", {"night": "1"})
            assert batch["expires_at"] == batch["created_at"] + 24 * 3600
            batch = await server.over(batch["id"])
            assert (batch["status"], batch["error_file_id"], batch["errors"]) == ("completed", None, None)
            assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
            assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"]
            answers = await server.lines(batch["output_file_id"])
            assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(30)]
            first = answers[0]
            assert (first["error"], first["response"]["status_code"]) == (None, 200)
            assert first["response"]["body"]["choices"][0]["message"]["content"] == "hé!"
            assert len({answer["id"] for answer in answers}) == 30

    async def test_what_the_answered_lines_used_is_told_while_it_runs_and_after(
        self, state: StateStore
    ) -> None:
        async with Server(state, taking_turns(HELLO, HELLO, hang())) as server:
            made = await server.create(lines(4))
            await server.completed(made["id"], 2)
            running = await server.show(made["id"])
            await server.http.post(f"/v1/batches/{made['id']}/cancel")
            batch = await server.over(made["id"])
            used = [one["response"]["body"]["usage"] for one in await server.lines(batch["output_file_id"])]
            assert running["status"] == "in_progress"
            assert running["usage"] == batch["usage"]
            assert batch["usage"]["input_tokens"] == sum(one["prompt_tokens"] for one in used) > 0
            assert batch["usage"]["output_tokens"] == sum(one["completion_tokens"] for one in used) > 0

    async def test_batches_of_a_state_directory_without_usage_are_read(
        self, state: StateStore, tmp_path: Path
    ) -> None:
        async with Server(state) as server:
            made = await server.create(lines(1))
            await server.over(made["id"])
        for name in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"):
            await state.run(lambda sql, name=name: sql.execute(f"ALTER TABLE batches DROP COLUMN {name}"))
        await state.run(lambda sql: sql.execute("DROP TABLE ridgeline_schema"))
        async with Server(state) as server:
            assert (await server.show(made["id"]))["usage"]["total_tokens"] == 0
            again = await server.over((await server.create(lines(1)))["id"])
            assert again["usage"]["total_tokens"] > 0

    async def test_lines_are_asked_in_the_background_and_few_at_a_time(self, state: StateStore) -> None:
        async with Server(state, hang()) as server:
            await server.create(lines(20))
            asked = server.stage.client.asked
            await until(lambda: len(asked) == 4)
            await asyncio.sleep(0.05)
            assert [one["priority"] for one in asked] == [BACKGROUND_PRIORITY] * 4

    async def test_a_bodys_own_priority_only_counts_behind_that(self, state: StateStore) -> None:
        async with Server(state) as server:
            content = line(0, priority=-5) + "\n" + line(1, priority=BACKGROUND_PRIORITY + 7)
            await server.over((await server.create(content))["id"])
            priorities = sorted(one["priority"] for one in server.stage.client.asked)
            assert priorities == [BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 7]

    async def test_a_line_that_is_refused_goes_into_the_error_file(self, state: StateStore) -> None:
        async with Server(state) as server:
            content = "\n".join([line(0), line(1, temperature="hot"), line(2, model="nobody"), line(3)])
            batch = await server.over((await server.create(content))["id"])
            assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
            output = await server.lines(batch["output_file_id"])
            errors = await server.lines(batch["error_file_id"])
            assert [answer["custom_id"] for answer in output] == ["c0", "c3"]
            assert [answer["response"]["status_code"] for answer in errors] == [400, 404]
            assert errors[0]["response"]["body"]["error"]["param"] == "temperature"

    async def test_completions_are_asked_too(self, state: StateStore) -> None:
        async with Server(state) as server:
            content = json.dumps(
                {"custom_id": "x", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}
            )
            batch = await server.over((await server.create(content, COMPLETIONS))["id"])
            (answer,) = await server.lines(batch["output_file_id"])
            assert answer["response"]["body"]["object"] == "text_completion"

    async def test_a_line_may_take_longer_than_anybody_would_wait(self, state: StateStore) -> None:
        async with Server(state, say("slow", pause_s=0.02), request_timeout_s=0.01) as server:
            batch = await server.over((await server.create(lines(2)))["id"])
            assert batch["request_counts"]["completed"] == 2
            answer = await server.http.post(CHAT, json=json.loads(line(0))["body"])
            assert answer.status_code == 504

    async def test_keys_are_no_hindrance(self, state: StateStore) -> None:
        async with Server(state, api_keys=("secret",)) as server:
            batch = await server.over((await server.create(lines(3)))["id"])
            assert batch["request_counts"]["completed"] == 3

    async def test_two_batches_go_on_side_by_side(self, state: StateStore) -> None:
        async with Server(state, say("x", pause_s=0.002)) as server:
            long = await server.create(lines(400))
            short = await server.create(lines(5))
            await server.over(short["id"])
            assert (await server.show(long["id"]))["status"] == "in_progress"


class TestValidation:
    async def errors(self, state: StateStore, content: str | bytes) -> list[tuple[str, int | None]]:
        async with Server(state) as server:
            batch = await server.over((await server.create(content))["id"])
            assert (batch["status"], batch["output_file_id"]) == ("failed", None)
            assert batch["failed_at"] is not None
            assert server.stage.client.asked == []
            return [(error["code"], error["line"]) for error in batch["errors"]["data"]]

    async def test_wrong_lines_are_named_and_nothing_is_asked(self, state: StateStore) -> None:
        content = "\n".join(
            [
                line(0),
                "{not json",
                "",
                line(0),
                line(1, url=COMPLETIONS),
                json.dumps({"custom_id": "g", "method": "GET", "url": CHAT, "body": {}}),
                json.dumps({"method": "POST", "url": CHAT, "body": {}}),
                json.dumps({"custom_id": "b", "method": "POST", "url": CHAT, "body": 5}),
                line(2, stream=True),
                line(3, background=True),
                json.dumps({"custom_id": "", "method": "POST", "url": CHAT, "body": {}}),
            ]
        )
        assert await self.errors(state, content) == [
            ("invalid_json_line", 2),
            ("duplicate_custom_id", 4),
            ("mismatched_url", 5),
            *[("invalid_request", number) for number in range(6, 12)],
        ]

    @pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
    async def test_an_empty_file_is_refused(self, state: StateStore, content: bytes) -> None:
        assert await self.errors(state, content) == [("empty_file", None)]

    async def test_bytes_that_are_no_text_are_refused(self, state: StateStore) -> None:
        assert await self.errors(state, b'\xff\xfe\n{"custom_id": "\xff"}') == [
            ("invalid_json_line", 1),
            ("invalid_json_line", 2),
        ]

    async def test_not_more_errors_are_told_than_can_be_read(self, state: StateStore) -> None:
        assert len(await self.errors(state, "x\n" * 500)) == MAX_ERRORS

    async def test_a_line_longer_than_a_body_may_be_is_refused_by_itself(self, state: StateStore) -> None:
        async with Server(state, max_body_bytes=500) as server:
            content = line(0) + "\n" + line(1, user="x" * 2000) + "\n" + line(2)
            batch = await server.over((await server.create(content))["id"])
            assert [(e["code"], e["line"]) for e in batch["errors"]["data"]] == [("line_too_long", 2)]

    async def test_deep_nesting_harms_nobody(self, state: StateStore) -> None:
        body = '{"custom_id": "a", "method": "POST", "url": "%s", "body": {"x": %s}}'
        (error,) = await self.errors(state, body % (CHAT, "[" * 100_000 + "]" * 100_000))
        assert error == ("invalid_json_line", 1)

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"endpoint": "/v1/files"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"metadata": {"a": 5}}, "metadata"),
            ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
            (
                {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
                "output_expires_after.seconds",
            ),
            ({"colour": "red"}, "colour"),
        ],
    )
    async def test_a_wrong_field_is_named(
        self, state: StateStore, change: dict[str, Any], param: str
    ) -> None:
        async with Server(state) as server:
            body = {
                "input_file_id": await server.upload(lines(1)),
                "endpoint": CHAT,
                "completion_window": "24h",
            }
            answer = await server.http.post("/v1/batches", json=body | change)
            assert answer.status_code == 400, answer.text
            assert (answer.json()["error"]["param"] or "").startswith(param)

    async def test_a_file_that_is_not_there_or_not_for_this_is_refused(self, state: StateStore) -> None:
        async with Server(state) as server:
            for file_id, status in (
                ("file-nobody", 404),
                (await server.upload(lines(1), purpose="user_data"), 400),
            ):
                body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
                answer = await server.http.post("/v1/batches", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (status, "input_file_id")


class TestTrouble:
    async def test_a_full_queue_and_a_dead_engine_are_waited_out(self, state: StateStore) -> None:
        script = taking_turns(
            fail(QueueFull(9, 1.0)), fail(EngineDied("gone")), fail(EngineDied("gone"), "half"), say("done")
        )
        async with Server(state, script) as server:
            batch = await server.over((await server.create(lines(2)))["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            answers = await server.lines(batch["output_file_id"])
            texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
            assert texts == ["done", "done"]

    async def test_an_engine_that_is_not_ready_is_waited_for(self, state: StateStore) -> None:
        async with Server(state) as server:
            server.stage.supervisor.reason = "the engine is being started"
            batch = await server.create(lines(2))
            await asyncio.sleep(0.05)
            server.stage.supervisor.reason = ""
            assert (await server.over(batch["id"]))["request_counts"]["completed"] == 2

    async def test_a_line_that_every_engine_dies_of_is_given_up(self, state: StateStore) -> None:
        async with Server(state, fail(EngineDied("gone"))) as server:
            batch = await server.over((await server.create(lines(1)))["id"])
            (answer,) = await server.lines(batch["error_file_id"])
            assert answer["response"]["body"]["error"]["code"] == "engine_died"
            assert len(server.stage.client.asked) == 1 + answering.MAX_DEATHS

    async def test_what_a_stopped_server_left_the_next_one_finishes_and_nothing_twice(
        self, state: StateStore
    ) -> None:
        some_then_none = taking_turns(*[say("first")] * 7, hang())
        async with Server(state, some_then_none) as server:
            batch = await server.create(lines(12))
            await server.completed(batch["id"], 7)
        async with Server(state, say("second")) as server:
            batch = await server.over(batch["id"])
            answers = await server.lines(batch["output_file_id"])
            assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(12)]
            texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
            assert (texts.count("first"), texts.count("second")) == (7, 5)

    async def test_a_stop_before_the_lines_were_read_is_no_loss(self, state: StateStore) -> None:
        server = Server(state)
        batch = await server.create(lines(5))  # never started
        assert (await server.show(batch["id"]))["status"] == "validating"
        await server.http.aclose()
        async with Server(state) as server:
            assert (await server.over(batch["id"]))["request_counts"]["completed"] == 5

    async def test_an_answer_that_comes_a_second_time_is_not_kept(self, state: StateStore) -> None:
        async with Server(state, hang()) as server:
            batch = await server.create(lines(2))
            await until(lambda: len(server.stage.client.asked) == 2)
            store = server.batches.store
            journal = Journal(store)
            await asyncio.gather(*(journal.keep(Finished(batch["id"], 1, 1, b"{}")) for _ in range(3)))
            assert (await server.show(batch["id"]))["request_counts"]["completed"] == 1
            assert [kept.answer for kept in await store.kept(batch["id"], 0, 9)] == [b"{}", None]

    async def test_answers_that_could_not_be_written_are_written_by_the_next(self, state: StateStore) -> None:
        async with Server(state, hang()) as server:
            batch = await server.create(lines(3))
            await until(lambda: len(server.stage.client.asked) == 3)
            store, failures = server.batches.store, [OSError("disk full")]

            class Sometimes:
                async def keep(self, rows: list[Finished]) -> None:
                    if failures:
                        raise failures.pop()
                    await store.keep(rows)

            journal = Journal(Sometimes())  # type: ignore[arg-type]
            rows = [Finished(batch["id"], number, 1, b"{}") for number in (1, 2, 3)]
            outcomes = await asyncio.gather(*map(journal.keep, rows), return_exceptions=True)
            assert sum(isinstance(outcome, OSError) for outcome in outcomes) == 1
            assert (await server.show(batch["id"]))["request_counts"]["completed"] == 3


class TestEnds:
    async def test_a_cancelled_batch_keeps_what_was_answered(self, state: StateStore) -> None:
        async with Server(state, taking_turns(say("x"), say("x"), hang())) as server:
            batch = await server.create(lines(10))
            await until(lambda: len(server.stage.client.asked) == 6)
            answer = await server.http.post(f"/v1/batches/{batch['id']}/cancel")
            assert answer.json()["status"] == "cancelling"
            batch = await server.over(batch["id"])
            assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
            assert batch["cancelling_at"] <= batch["cancelled_at"]
            assert len(await server.lines(batch["output_file_id"])) == 2
            await until(lambda: len(server.stage.client.aborted) == 4)
            again = await server.http.post(f"/v1/batches/{batch['id']}/cancel")
            assert (again.status_code, again.json()["error"]["param"]) == (409, "batch_id")

    async def test_cancelled_and_killed_it_is_cancelled_by_the_next_server(self, state: StateStore) -> None:
        server = Server(state)
        batch = await server.create(lines(5))
        await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        await server.http.aclose()
        async with Server(state) as server:
            batch = await server.over(batch["id"])
            assert (batch["status"], server.stage.client.asked) == ("cancelled", [])

    async def test_what_is_not_done_in_time_expires_and_says_so(self, state: StateStore) -> None:
        async with Server(state, taking_turns(say("x"), say("x"), hang())) as server:
            batch = await server.create(lines(4))
            await server.completed(batch["id"], 2)
            past = int(time.time()) - 1
            await server.batches.store.change(
                batch["id"], lambda b: msgspec.structs.replace(b, expires_at=past)
            )
        async with Server(state, hang()) as server:
            batch = await server.over(batch["id"])
            assert (batch["status"], batch["expired_at"] is not None) == ("expired", True)
            assert len(await server.lines(batch["output_file_id"])) == 2
            errors = await server.lines(batch["error_file_id"])
            assert [(e["custom_id"], e["error"]["code"]) for e in errors] == [
                ("c2", "batch_expired"),
                ("c3", "batch_expired"),
            ]

    async def test_an_input_that_is_being_read_cannot_be_deleted(self, state: StateStore) -> None:
        async with Server(state, hang()) as server:
            batch = await server.create(lines(2))
            path = f"/v1/files/{batch['input_file_id']}"
            assert (await server.http.delete(path)).status_code == 409
            await server.batches.store.sweep(time.time() + 99 * 24 * 3600, 0)
            assert (await server.http.get(path)).status_code == 200
            await server.http.post(f"/v1/batches/{batch['id']}/cancel")
            await server.over(batch["id"])
            assert (await server.http.delete(path)).status_code == 200

    async def test_batches_are_listed_newest_first(self, state: StateStore) -> None:
        async with Server(state) as server:
            ids = [(await server.create(lines(1)))["id"] for _ in range(3)]
            for batch_id in ids:
                await server.over(batch_id)
            page = (await server.http.get("/v1/batches", params={"limit": 2})).json()
            assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (ids[:0:-1], True)
            assert page["data"][0]["request_counts"]["completed"] == 1
            rest = (await server.http.get("/v1/batches", params={"after": ids[1]})).json()
            assert [batch["id"] for batch in rest["data"]] == ids[:1]
            assert (await server.http.get("/v1/batches/batch_nobody")).status_code == 404


def test_the_openai_sdk_runs_a_batch_on_a_real_engine(live_server: LiveServer) -> None:
    client = OpenAI(
        base_url=f"{live_server.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    )
    body = {"model": "smollm2-135m", "max_tokens": 4, "temperature": 0}
    content = "\n".join(line(i, **body) for i in range(8))
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + PATIENCE_S
    while batch.status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    answers = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    alone = client.chat.completions.create(
        messages=[{"role": "user", "content": "q3"}],
        **body,  # type: ignore[arg-type]
    )
    assert (
        answers[3]["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    )
    assert [answer["custom_id"] for answer in answers] == [f"c{i}" for i in range(8)]
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    for file_id in (file.id, batch.output_file_id):
        assert client.files.delete(file_id).deleted
    with pytest.raises(Exception, match="there is no file"):
        client.files.retrieve(file.id)
