"""What /v1/responses keeps: chains, retrieval over a restart, pages of input, and its bounds."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.config import ServerConfig
from ridgeline.server.records.state import StateStore
from tests.server.responses import CALL, RESPONSES, THINKING, WEATHER, keeping, prompt_of, sdk, told
from tests.server.scripted_client import say
from tests.server.stage import Stage
from tests.server.test_openapi import assert_answer

UNKNOWN = "resp_" + "0" * 48


async def test_a_response_is_found_again_after_a_restart(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input="hello", metadata={"a": "b"})
    assert stage.state is not None
    stage.state.close()
    async with sdk(keeping(tmp_path)) as client:
        assert await client.responses.retrieve(made.id) == made


async def test_whoever_reads_the_last_event_finds_the_response(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    text = (await stage.post(RESPONSES, {"input": "hello", "stream": True})).text
    last = told(text)[-1]["response"]
    async with stage.http() as http:
        assert (await http.get(f"{RESPONSES}/{last['id']}")).json() == last


async def test_a_conversation_goes_on_from_any_of_its_responses(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        first = await client.responses.create(model="m", input="a", instructions="once")
        second = await client.responses.create(model="m", input="b", previous_response_id=first.id)
        await client.responses.create(model="m", input="c", previous_response_id=second.id)
        assert prompt_of(stage) == "user: a\nassistant: hé!\nuser: b\nassistant: hé!\nuser: c\nassistant: "
        await client.responses.create(model="m", input="d", previous_response_id=first.id)
        assert prompt_of(stage) == "user: a\nassistant: hé!\nuser: d\nassistant: "
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model="m", input="e", previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"
    assert first.id in gone.value.message


async def test_a_call_its_result_and_the_answer_are_one_conversation(tmp_path: Path) -> None:
    stage = keeping(tmp_path, say(f"<think>hm</think>{CALL}"), template=THINKING)
    tools: Any = [WEATHER]
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input="q", tools=tools)
        call: Any = made.output[-1]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        await client.responses.create(model="m", input=result, previous_response_id=made.id, tools=tools)
        kept = prompt_of(stage)
        # The same without the store: everything is sent back as the SDK has it.
        sent: Any = [{"role": "user", "content": "q"}, *(item.model_dump() for item in made.output), *result]
        await client.responses.create(model="m", input=sent, tools=tools, store=False)
    assert prompt_of(stage) == kept
    assert "rain" in kept


async def test_an_item_may_be_meant_by_its_id_if_the_id_was_made_here(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    guessable: Any = [{"role": "user", "content": "secret", "id": "msg_1", "type": "message"}]
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input=guessable)
        meant: Any = [
            {"type": "item_reference", "id": made.output[0].id},
            {"role": "user", "content": "more"},
        ]
        await client.responses.create(model="m", input=meant)
        assert prompt_of(stage) == "assistant: hé!\nuser: more\nassistant: "
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_1"}])
    assert unknown.value.param == "input[0].id"


async def test_the_input_is_listed_in_pages_either_way(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    given: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input=given)
        items = client.responses.input_items
        down: list[Any] = [item async for item in items.list(made.id, limit=2)]
        up: list[Any] = [item async for item in items.list(made.id, limit=2, order="asc")]
    assert [item.content[0].text for item in up] == ["0", "1", "2", "3", "4"]
    assert down == up[::-1]
    async with stage.http() as http:
        path = f"{RESPONSES}/{made.id}/input_items"
        page = (await http.get(path, params={"limit": 2, "order": "asc", "after": up[1].id})).json()
        assert ([item["id"] for item in page["data"]], page["has_more"]) == ([up[2].id, up[3].id], True)
        assert (page["first_id"], page["last_id"]) == (up[2].id, up[3].id)
        wrong = {"limit": "0", "order": "up", "after": "x" * 300}
        for name, value in wrong.items():
            answer = await http.get(path, params={name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert (await http.get(path, params={"after": "msg_unknown"})).status_code == 404


async def test_a_deleted_response_is_gone(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        made = await client.responses.create(model="m", input="a")
    async with stage.http() as http:
        path = f"{RESPONSES}/{made.id}"
        assert (await http.delete(path)).json() == {"id": made.id, "object": "response", "deleted": True}
        for answer in (await http.get(path), await http.delete(path), await http.get(f"{path}/input_items")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "id", [UNKNOWN, "resp_", "x" * 5000, "%00", "%ED%A0%80", "..%2F..", "' OR 1=1 --", "é"]
)
async def test_an_id_that_names_nothing_is_answered_404(tmp_path: Path, id: str) -> None:
    stage = keeping(tmp_path)
    async with stage.http() as http:
        for answer in (
            await http.get(f"{RESPONSES}/{id}"),
            await http.delete(f"{RESPONSES}/{id}"),
            await http.post(f"{RESPONSES}/{id}/cancel"),
            await http.get(f"{RESPONSES}/{id}/input_items"),
        ):
            assert answer.status_code == 404, answer.text
    answer = await stage.post(RESPONSES, {"input": "a", "previous_response_id": id})
    assert answer.status_code == (404 if len(id) <= 256 else 400)
    assert answer.json()["error"]["param"] == "previous_response_id"


async def test_nothing_is_kept_of_a_response_that_says_so(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    body = (await stage.post(RESPONSES, {"input": "a", "store": False})).json()
    async with stage.http() as http:
        assert (await http.get(f"{RESPONSES}/{body['id']}")).status_code == 404


async def test_a_server_without_a_state_directory_says_that_it_keeps_nothing(stage: Stage) -> None:
    assert (await stage.post(RESPONSES, {"input": "a"})).json()["store"] is False
    for field, value in (("store", True), ("background", True)):
        answer = await stage.post(RESPONSES, {"input": "a", field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    answer = await stage.post(RESPONSES, {"input": "a", "previous_response_id": UNKNOWN})
    assert answer.status_code == 404


async def test_the_longest_unused_makes_room_and_a_chain_in_use_stays(tmp_path: Path) -> None:
    stage = keeping(tmp_path, config=ServerConfig(response_store_count=3))
    async with sdk(stage) as client:
        first = await client.responses.create(model="m", input="a")
        other = await client.responses.create(model="m", input="b")
        second = await client.responses.create(model="m", input="c", previous_response_id=first.id)
        third = await client.responses.create(model="m", input="d", previous_response_id=second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(other.id)
        for kept in (first, second, third):
            await client.responses.retrieve(kept.id)


async def test_bytes_and_age_are_bounded(tmp_path: Path) -> None:
    stage = keeping(tmp_path, config=ServerConfig(response_store_bytes=3000))
    async with sdk(stage) as client:
        ids = [(await client.responses.create(model="m", input="a" * 100)).id for _ in range(6)]
    assert stage.state is not None
    rows = await stage.state.run(lambda c: c.execute("SELECT id, bytes FROM responses").fetchall())
    assert sum(row[1] for row in rows) <= 3000
    assert ids[-1] in [row[0] for row in rows]
    items = await stage.state.run(
        lambda c: c.execute("SELECT DISTINCT response FROM response_items").fetchall()
    )
    assert {row[0] for row in items} == {row[0] for row in rows}
    stage.state.close()
    short = keeping(tmp_path, config=ServerConfig(response_retention_s=0.0))
    async with sdk(short) as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[-1])


async def test_a_store_that_cannot_be_written_is_told_and_not_hidden(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    assert (await stage.post(RESPONSES, {"input": "a"})).status_code == 200
    assert stage.state is not None

    def forbid(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA query_only = ON")

    await stage.state.run(forbid)
    answer = await stage.post(RESPONSES, {"input": "a"})
    assert answer.status_code == 500
    assert "store" in answer.json()["error"]["message"]
    assert (await stage.post(RESPONSES, {"input": "a", "store": False})).status_code == 200


async def test_a_conversation_of_too_many_items_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ridgeline.server.responses_api.store.MAX_ITEMS", 4)
    stage = keeping(tmp_path)
    previous = None
    async with sdk(stage) as client:
        for _ in range(3):
            made = await client.responses.create(model="m", input="a", previous_response_id=previous)
            previous = made.id
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="a", previous_response_id=previous)
    assert refused.value.param == "previous_response_id"


async def test_two_turns_at_once_from_one_response_are_two_conversations(tmp_path: Path) -> None:
    stage = keeping(tmp_path)
    async with sdk(stage) as client:
        first = await client.responses.create(model="m", input="a")
        both = await asyncio.gather(
            *(client.responses.create(model="m", input=text, previous_response_id=first.id) for text in "bc")
        )
    assert both[0].id != both[1].id
    prompts = {prompt_of(stage, number) for number in (1, 2)}
    assert prompts == {f"user: a\nassistant: hé!\nuser: {text}\nassistant: " for text in "bc"}


def test_the_tables_are_made_in_a_state_that_others_use_too(tmp_path: Path) -> None:
    state = StateStore(tmp_path)

    async def both() -> None:
        await state.run(lambda c: c.execute("CREATE TABLE other (a)"))
        answer = await Stage(state=state).post(RESPONSES, {"input": "a"})
        assert answer.status_code == 200

    asyncio.run(both())
    state.close()


async def test_every_answer_is_what_the_document_says(tmp_path: Path) -> None:
    stage = keeping(tmp_path, say(f"<think>hm</think>Wait.{CALL}"), template=THINKING)
    asked = {"input": "q", "tools": [WEATHER], "include": ["message.output_text.logprobs"]}
    described = {(endpoint.method, endpoint.path): endpoint for endpoint in ENDPOINTS}
    one = f"{RESPONSES}/{{response_id}}"
    for extra in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
        assert_answer(described["POST", RESPONSES], await stage.post(RESPONSES, {**asked, **extra}))
    made = (await stage.post(RESPONSES, {**asked, "background": True})).json()
    async with stage.http() as http:
        path = f"{RESPONSES}/{made['id']}"
        assert_answer(described["POST", f"{one}/cancel"], await http.post(f"{path}/cancel"))
        assert_answer(described["GET", one], await http.get(path))
        assert_answer(described["GET", f"{one}/input_items"], await http.get(f"{path}/input_items"))
        assert_answer(described["DELETE", one], await http.delete(path))
        assert_answer(described["GET", one], await http.get(path))
