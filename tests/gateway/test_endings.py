"""How requests end when something goes wrong on the way: the client is told, and nothing is kept back."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.scripted_upstream import Answer, Asked, always, whole
from tests.gateway.stage import CHAT, asking, staged
from tests.gateway.test_trust import ANSWER, scripted

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> str:
    return f'data: {{"choices":[{{"delta":{{"content":{json.dumps(text)}}}}}]}}\n\n'


async def cut_in_an_event(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(event("one") + event("two")[:30]))
    await writer.drain()
    writer.close()


async def silent_after_one(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(event("one")))
    await writer.drain()
    await asyncio.sleep(600)


def events_of(text: str) -> list[Any]:
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]


@pytest.mark.parametrize("usage", [True, False])
async def test_the_error_after_half_an_event_is_an_event_of_its_own(tmp_path: Path, usage: bool) -> None:
    async with scripted(tmp_path, cut_in_an_event) as (stage, _):
        body = asking(stream=True, stream_options={"include_usage": usage})
        text = (await stage.http.post(CHAT, json=body)).text
        last = [part for part in text.split("\n\n") if part][-1]
        assert json.loads(last[6:])["error"]["code"] == "upstream_broken"


async def test_a_stream_whose_time_is_up_says_so(tmp_path: Path) -> None:
    gateway = {"request_timeout_s": 1.0}
    async with scripted(tmp_path, silent_after_one, gateway=gateway) as (stage, _):
        text = (await stage.http.post(CHAT, json=asking(stream=True))).text
        assert events_of(text)[-1]["error"]["code"] == "upstream_timeout"
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["error_code"]) == ("upstream_failed", "upstream_timeout")
        assert stage.parts.upstreams.snapshot()[0].inflight == 0


async def test_what_came_before_a_break_reaches_a_slow_reader_whole(tmp_path: Path) -> None:
    many = 4_000

    async def long_then_cut(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for start in range(0, many, 1000):
            writer.write(
                chunk("".join(event(f"word {n:06}" + "." * 200) for n in range(start, start + 1000)))
            )
            await writer.drain()
        writer.close()

    async with scripted(tmp_path, long_then_cut) as (stage, _):
        async with stage.http.stream("POST", CHAT, json=asking(stream=True)) as answer:
            await asyncio.sleep(0.3)
            text = "".join([piece async for piece in answer.aiter_text()])
        events = events_of(text)
        assert len(events) == many + 1
        assert events[-1]["error"]["code"] == "upstream_broken"


async def test_a_cheap_answer_that_breaks_off_gives_its_place_back(tmp_path: Path) -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.json()["model"] == "weak":
            writer.write(whole(200, ANSWER)[:-5])
            await writer.drain()
            writer.close()
        else:
            writer.write(whole(200, ANSWER))

    models = [{"name": name, "targets": (f"up/{name}",)} for name in ("weak", "strong")]
    routes = [{"name": "auto", "models": ("weak", "strong"), "default": "weak", "cascade": True}]
    async with scripted(tmp_path, answer, models=models, routes=routes) as (stage, _):
        answer_ = await stage.http.post(CHAT, json=asking("auto"))
        assert answer_.status_code == 200
        assert stage.parts.upstreams.snapshot()[0].inflight == 0
        weak, strong = await stage.rows(2)
        assert (weak["outcome"], strong["outcome"]) == ("upstream_failed", "ok")


async def test_a_client_that_leaves_after_a_large_body_frees_the_upstream(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        host, port = stage.url[7:].split(":")
        body = json.dumps({**asking("mock_out4_late600000"), "user": "x" * 900_000}).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stage.secret}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        # The last piece comes while the gateway waits for it, and is larger than uvicorn's high-water mark.
        writer.write(head.encode() + body[:-200_000])
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(body[-200_000:])
        await writer.drain()
        while not stage.mock.running:
            await asyncio.sleep(0.005)
        writer.close()
        await stage.upstream_is_idle()
        (row,) = await stage.rows(1)
        assert row["outcome"] == "client_gone"


@pytest.mark.parametrize("field", [{"background": True}, {"conversation": "conv_of_somebody"}])
async def test_a_response_that_could_not_be_booked_or_is_anybodys_is_refused(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    ok: Answer = always(200, {"id": "resp_1"})
    async with scripted(tmp_path, ok) as (stage, upstream):
        refused = await stage.http.post("/v1/responses", json={"model": "m", "input": "x", **field})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))
        assert not upstream.asked


async def test_a_fault_of_ours_is_logged_by_its_place_and_not_by_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tmp_path) as stage:

        def fail(name: str) -> None:
            raise ValueError(f"no such thing: {name}")

        monkeypatch.setattr(stage.parts.catalog, "find", fail)
        monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)
        answer = await stage.http.post(CHAT, json=asking("words-of-a-client"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        # Other tests may have left a handler that takes the same record a second time.
        (record,) = {id(one): one for one in caplog.records if one.message == "unexpected error"}.values()
        assert record.exc_info is None
        assert "test_endings.py" in vars(record)["traceback"]
        assert "words-of-a-client" not in str(vars(record))
        assert "words-of-a-client" not in answer.text
        (row,) = await stage.rows(1)
        assert row["status"] == 500
