"""The guard in a running gateway: an upstream that says back what it was told sees placeholders, the client
its own values; every endpoint, whole and streamed, goes through the one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from ridgeline.gateway.guard.scanner import Scanner
from tests.gateway.guard import events
from tests.gateway.stage import CHAT, staged

MAIL = "ann.lee@example.org"


class Echo:
    """Says back a chat's last message, in pieces of three letters when streamed; keeps every body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.bodies.append(body)
        if "messages" not in body:
            return web.json_response(
                {"object": "list", "data": [], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
            )
        text = body["messages"][-1]["content"]
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return web.json_response({"id": "c", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        data = events.chat([text[at : at + 3] for at in range(0, len(text), 3)], [])
        for at in range(0, len(data), 50):
            await response.write(data[at : at + 50])
        return response

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def sections(url: str, **guard: Any) -> dict[str, Any]:
    upstream = {"name": "mock", "kind": "ridgeline", "url": url, "probe_s": 0.0}
    return {"upstreams": [upstream], "guards": [{"name": "default", **guard}]}


def test_the_upstream_sees_placeholders_and_the_client_its_values(tmp_path, monkeypatch):
    async def run() -> None:
        echo = Echo()
        async with echo.running() as url, staged(tmp_path, sections(url, block=("card",))) as gateway:
            question = {
                "model": "m",
                "messages": [{"role": "user", "content": f"Write to {MAIL} now, {MAIL}."}],
            }
            whole = (await gateway.http.post(CHAT, json=question)).json()
            assert whole["choices"][0]["message"]["content"] == f"Write to {MAIL} now, {MAIL}."
            streamed = (await gateway.http.post(CHAT, json={**question, "stream": True})).content
            assert events.chat_texts(streamed)[0] == f"Write to {MAIL} now, {MAIL}."
            assert streamed.endswith(b"data: [DONE]\n\n")
            await gateway.http.post("/v1/embeddings", json={"model": "m", "input": MAIL})
            assert len(echo.bodies) == 3
            assert MAIL not in json.dumps(echo.bodies)
            assert echo.bodies[2]["input"] == "<EMAIL_1>"

            question["messages"][0]["content"] = "card 4111 1111 1111 1111"
            blocked = await gateway.http.post(CHAT, json=question)
            assert (blocked.status_code, blocked.json()["error"]["code"]) == (400, "content_blocked")
            assert "4111" not in blocked.text

            monkeypatch.setattr(Scanner, "replaced", broken)
            failed = await gateway.http.post(CHAT, json=question)
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "guard_failed")
            assert len(echo.bodies) == 3  # neither was forwarded
            rows = await gateway.rows(5)
            assert json.loads(rows[0]["guard"])["found"] == {"email": 2}
            assert not any(MAIL in str(value) for row in rows for value in row.values())

    asyncio.run(run())


def broken(self: Scanner, *arguments: object) -> str:
    raise ValueError(MAIL)


def test_answers_are_redacted_in_the_stream_and_an_upload_is_refused(tmp_path):
    async def run() -> None:
        echo = Echo()
        values = sections("", redact=(), answers_redact=("email",))
        async with echo.running() as url:
            values["upstreams"][0]["url"] = url
            async with staged(tmp_path, values) as gateway:
                question = {
                    "model": "m",
                    "stream": True,
                    "messages": [{"role": "user", "content": f"To {MAIL}!"}],
                }
                streamed = (await gateway.http.post(CHAT, json=question)).content
                assert events.chat_texts(streamed)[0] == "To <EMAIL>!"
                upload = {"file": ("a.wav", b"RIFF", "audio/wav")}
                refused = await gateway.http.post(
                    "/v1/audio/transcriptions", data={"model": "m"}, files=upload
                )
                assert refused.status_code == 400
                assert len(echo.bodies) == 1

    asyncio.run(run())
