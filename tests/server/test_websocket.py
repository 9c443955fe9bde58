"""A WebSocket carries what the event stream does; requests share it; a disconnect aborts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.server.config import ServerConfig
from ridgeline.server.http.websocket import Conversation
from ridgeline.server.records.state import StateStore
from ridgeline.telemetry.logs import JsonFormatter
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S
from tests.server.events import chunks
from tests.server.scripted_client import fail, flood, hang, say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage, until

Frame = dict[str, Any]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, HELLO),
    "chat with usage": (CHAT, {**HELLO, "stream_options": {"include_usage": True}}),
    "chat with logprobs and samples": (CHAT, {**HELLO, "n": 3, "logprobs": True, "top_logprobs": 2}),
    "completions": (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 1, "echo": True}),
}


@contextlib.asynccontextmanager
async def connected(stage: Stage, path: str = CHAT, **options: Any) -> AsyncIterator[ClientConnection]:
    async with stage.served() as http:
        url = f"ws://{http.base_url.host}:{http.base_url.port}{path}"
        async with connect(url, open_timeout=PATIENCE_S, **options) as socket:
            yield socket


async def ask(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def frame(socket: ClientConnection) -> Frame:
    found: Frame = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE_S))
    return found


async def frames_until(socket: ClientConnection, *types: str) -> list[Frame]:
    found = [await frame(socket)]
    while found[-1].get("type") not in types:
        found.append(await frame(socket))
    return found


@pytest.mark.parametrize("what", ASKED)
async def test_the_frames_are_the_events_of_the_stream(what: str) -> None:
    path, body = ASKED[what]
    stage = Stage()
    streamed = chunks((await stage.post(path, {**body, "stream": True})).text)
    async with connected(stage, path) as socket:
        await ask(socket, **body)
        *frames, done = await frames_until(socket, "done")
    assert done == {"type": "done"}
    same = ("id", "created")
    assert [_without(one, same) for one in frames] == [_without(one, same) for one in streamed]
    assert len({one["id"] for one in frames}) == 1


NAMED_EVENTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "hello"}, "response.completed"),
    "/v1/messages": ({"messages": HELLO["messages"], "max_tokens": 9}, "message_stop"),
}


@pytest.mark.parametrize("path", NAMED_EVENTS)
async def test_endpoints_with_named_events_send_the_same_ones(path: str, tmp_path: Path) -> None:
    body, last = NAMED_EVENTS[path]
    with contextlib.closing(StateStore(tmp_path)) as state:
        stage = Stage(state=state)
        streamed = await stage.post(path, {**body, "stream": True})
        async with connected(stage, path) as socket:
            await ask(socket, **body)
            frames = await frames_until(socket, last)
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: ")]
    told = [json.loads(line) for line in lines]
    assert len(told) > 3
    said = ("type", "delta", "sequence_number")
    assert [[one.get(key) for key in said] for one in frames] == [
        [one.get(key) for key in said] for one in told
    ]


async def test_openais_sdk_speaks_its_websocket_mode_with_us(tmp_path: Path) -> None:
    with contextlib.closing(StateStore(tmp_path)) as state:
        stage = Stage(state=state)
        async with stage.served() as http:
            client = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="unused")
            async with client.responses.connect() as connection:
                previous: str | None = None
                for text in ("hello", "and again"):
                    turn = {"input": text, "previous_response_id": previous}
                    await connection.send({"type": "response.create", "model": "m", **turn})  # type: ignore[misc]
                    async for event in connection:
                        if event.type == "response.completed":
                            previous = event.response.id
                            assert event.response.output_text == "hé!"
                            break
                await connection.send({"type": "response.create", "input": 5})  # type: ignore[typeddict-item]
                async for event in connection:
                    assert event.type == "error"
                    assert (event.status, event.error.param) == (400, "input")
                    break
        assert "and again" in stage.client.tokenizer.decode(stage.client.asked[1]["prompt"])
        assert "hello" in stage.client.tokenizer.decode(stage.client.asked[1]["prompt"])


async def test_a_client_that_does_not_answer_pings_is_given_up() -> None:
    stage = Stage(hang("begun"), ServerConfig(websocket_ping_s=0.1))
    async with stage.served() as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(
            f"GET {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 101")
        frame = json.dumps(HELLO).encode()
        assert len(frame) < 126
        writer.write(bytes([0x81, 0x80 | len(frame)]) + bytes(4) + frame)  # masked with zeros
        await asyncio.wait_for(reader.read(), PATIENCE_S)  # to the end of the connection
        await until(lambda: stage.client.aborted)
        writer.close()


async def test_a_whole_answer_is_one_frame_if_asked_for() -> None:
    stage = Stage()
    async with connected(stage) as socket:
        await ask(socket, **HELLO, stream=False)
        answer, done = await frames_until(socket, "done")
    assert answer["choices"][0]["message"]["content"] == "hé!"
    assert done == {"type": "done"}


async def test_named_streams_run_side_by_side_and_every_frame_says_whose_it_is() -> None:
    stage = Stage(say("a long enough text", pause_s=0.005))
    async with connected(stage) as socket:
        for name in ("one", "two"):
            await ask(socket, stream_id=name, **HELLO)
        found = [await frame(socket)]
        while sum(one.get("type") == "done" for one in found) < 2:
            found.append(await frame(socket))
    names = [one["stream_id"] for one in found]
    assert names not in (sorted(names), sorted(names, reverse=True)), "they did not interleave"
    for name in ("one", "two"):
        texts = [
            choice["delta"].get("content", "")
            for one in found
            if one["stream_id"] == name
            for choice in one.get("choices", ())
        ]
        assert "".join(texts) == "a long enough text"


async def test_requests_of_one_stream_run_one_after_the_other() -> None:
    stage = Stage(say("ab", pause_s=0.005))
    async with connected(stage) as socket:
        for _ in range(3):
            await ask(socket, **HELLO)
        for _ in range(3):
            *frames, _done = await frames_until(socket, "done")
            assert len({one["id"] for one in frames}) == 1
            assert frames[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["cancel", "response.cancel"])
async def test_a_cancelled_request_is_aborted_and_the_connection_goes_on(kind: str) -> None:
    stage = Stage(hang("begun"))
    async with connected(stage) as socket:
        await ask(socket, stream_id="s", **HELLO)
        await ask(socket, stream_id="s", **HELLO)
        assert (await frame(socket))["choices"][0]["delta"]["role"] == "assistant"
        await ask(socket, type=kind, stream_id="s")
        assert (await frames_until(socket, "cancelled"))[-1] == {"type": "cancelled", "stream_id": "s"}
        assert len(stage.client.asked) == len(stage.client.aborted) == 1
        stage.client.script = say("again")
        await ask(socket, stream_id="s", **HELLO)
        await frames_until(socket, "done")


async def test_closing_the_connection_aborts_all_that_is_unfinished() -> None:
    stage = Stage(hang("begun"))
    async with connected(stage) as socket:
        for name in ("one", "two"):
            await ask(socket, stream_id=name, **HELLO)
        await until(lambda: len(stage.client.asked) == 2)
        await socket.close()
        await until(lambda: len(stage.client.aborted) == 2)


async def test_a_client_that_vanishes_is_aborted_too() -> None:
    stage = Stage(hang("begun"))
    async with connected(stage) as socket:
        await ask(socket, **HELLO)
        await until(lambda: stage.client.asked)
        socket.transport.abort()
        await until(lambda: stage.client.aborted)


BAD: dict[str, tuple[str | bytes, int, str | None]] = {
    "no JSON": ("{", 400, None),
    "no object": ("[1]", 400, None),
    "bad UTF-8": (b'{"messages": "\xff"}', 400, None),
    "bytes in the name of a stream": (rb'{"stream_id": "\ud800"}', 400, "stream_id"),
    "too deep": ('{"user": ' + "[" * 100_000, 400, None),
    "unknown type": ('{"type": "session.update"}', 400, "type"),
    "type of a wrong type": ('{"type": 1}', 400, "type"),
    "stream_id of a wrong type": ('{"stream_id": {}}', 400, "stream_id"),
    "empty stream_id": ('{"stream_id": ""}', 400, "stream_id"),
    "long stream_id": (json.dumps({"stream_id": "x" * 129}), 400, "stream_id"),
    "wrong field": (json.dumps({**HELLO, "temperature": "hot"}), 400, "temperature"),
    "unknown model": (json.dumps({**HELLO, "model": "x"}), 404, "model"),
    "nothing to cancel": ('{"type": "cancel"}', 404, "stream_id"),
}


async def test_what_is_wrong_with_a_message_is_said_in_a_frame_and_the_connection_goes_on() -> None:
    stage = Stage()
    async with connected(stage) as socket:
        for what, (message, status, param) in BAD.items():
            await socket.send(message)
            told = await frame(socket)
            assert (told["type"], told["status"], told["error"]["param"]) == ("error", status, param), what
            assert stage.client.asked == []
        await ask(socket, **HELLO)
        await frames_until(socket, "done")


async def test_a_failure_midway_is_an_error_frame_and_nothing_follows() -> None:
    stage = Stage(fail(EngineDied("it died"), after="so far"))
    async with connected(stage) as socket:
        await ask(socket, stream_id="s", **HELLO)
        told = (await frames_until(socket, "error"))[-1]
        assert (told["stream_id"], told["error"]["code"]) == ("s", "engine_died")
        stage.client.script = say("fine")
        await ask(socket, **HELLO)
        assert [one.get("type") for one in await frames_until(socket, "done")].count("error") == 0


async def test_a_full_queue_is_said_with_its_status() -> None:
    async with connected(Stage(fail(QueueFull("full", 3.0)))) as socket:
        await ask(socket, **HELLO)
        told = await frame(socket)
        assert (told["status"], told["error"]["code"]) == (429, "queue_full")


async def test_more_requests_than_the_limit_are_refused_while_the_others_run() -> None:
    stage = Stage(hang("begun"), ServerConfig(websocket_requests=2))
    async with connected(stage) as socket:
        await ask(socket, stream_id="a", **HELLO)
        await ask(socket, stream_id="a", **HELLO)
        await ask(socket, stream_id="b", **HELLO)
        told = (await frames_until(socket, "error"))[-1]
        assert (told["status"], told["stream_id"]) == (429, "b")
        assert stage.client.aborted == []


async def test_a_message_larger_than_a_body_may_be_closes_the_connection() -> None:
    stage = Stage(config=ServerConfig(max_body_bytes=1000))
    async with connected(stage) as socket:
        with contextlib.suppress(ConnectionClosed):
            await socket.send("x" * 1001)
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(socket.recv(), PATIENCE_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_reader_that_stops_reading_is_cut() -> None:
    config = ServerConfig(stream_stall_s=0.2, stream_buffer_chunks=8)
    stage = Stage(flood(chunks=3000, characters=10_000), config)
    async with connected(stage, max_queue=1, close_timeout=0.2) as socket:
        await ask(socket, **HELLO)
        await until(lambda: stage.client.aborted)
    assert "ridgeline:slow_readers_cut_total" in stage.metrics_text()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}],
    ids=["no key", "a wrong key", "a wrong key, Anthropic's way"],
)
async def test_without_a_key_there_is_no_connection(headers: dict[str, str]) -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    with pytest.raises(InvalidStatus) as refused:
        async with connected(stage, additional_headers=headers):
            pass
    answer = refused.value.response
    assert answer.status_code == 401
    assert json.loads(answer.body or b"")["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("headers", [{"authorization": "Bearer secret"}, {"x-api-key": "secret"}])
async def test_with_a_key_the_requests_have_it_too(headers: dict[str, str]) -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    async with connected(stage, additional_headers=headers) as socket:
        await ask(socket, **HELLO)
        await frames_until(socket, "done")


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/health"])
async def test_a_path_that_does_not_stream_has_no_websocket(path: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with connected(Stage(), path):
            pass
    assert refused.value.response.status_code == 404


async def test_a_websocket_counts_for_its_address_until_it_is_closed() -> None:
    async with Stage(config=ServerConfig(max_connections_per_address=1)).served() as http:
        url = f"ws://{http.base_url.host}:{http.base_url.port}"
        for path in (CHAT, CHAT, "/health"):  # the last one refuses its handshake
            with contextlib.suppress(InvalidStatus):
                async with connect(url + path, open_timeout=PATIENCE_S):
                    refused = await http.get("/health")
                    assert (refused.status_code, refused.json()["error"]["code"]) == (
                        503,
                        "too_many_connections",
                    )
            async with asyncio.timeout(PATIENCE_S):
                headers = {"connection": "close"}
                while (await http.get("/health", headers=headers)).status_code != 200:
                    await asyncio.sleep(0.01)


async def test_a_page_of_another_origin_may_not_connect_unless_it_is_allowed() -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with connected(Stage(), origin="https://evil.example"):
            pass
    assert refused.value.response.status_code == 403
    allowed = Stage(config=ServerConfig(cors_origins=("https://good.example",)))
    async with connected(allowed, origin="https://good.example") as socket:
        await ask(socket, **HELLO)
        await frames_until(socket, "done")


async def test_a_refused_handshake_is_one_log_record_like_any_refused_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ridgeline")
    stage = Stage()
    with pytest.raises(InvalidStatus) as refused:
        async with connected(
            stage, origin="https://evil.example", additional_headers={"x-request-id": "mine"}
        ):
            pass
    assert refused.value.response.headers["x-request-id"] == "mine"
    (record,) = [record for record in caplog.records if record.name.startswith("ridgeline")]
    assert (record.message, record.request_id, record.status) == ("request", "mine", 403)  # type: ignore[attr-defined]
    assert 'reason="origin_not_allowed"' in stage.metrics_text()


async def test_an_error_on_a_websocket_is_one_log_record(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Conversation) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Conversation, "run", broken)
    with pytest.raises(ConnectionClosed):
        async with connected(Stage()) as socket:
            await socket.recv()
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "ValueError: broken" in json.loads(JsonFormatter().format(record))["exception"]
    assert (record.name, record.path) == ("ridgeline.web", CHAT)  # type: ignore[attr-defined]


async def test_a_real_server_says_the_same_both_ways(live_server: LiveServer) -> None:
    body = {"messages": HELLO["messages"], "max_tokens": 12, "temperature": 0}
    whole = httpx.post(f"{live_server.base_url}{CHAT}", json=body, timeout=PATIENCE_S).json()
    url = f"{live_server.base_url.replace('http', 'ws')}{CHAT}"
    async with connect(url, open_timeout=PATIENCE_S) as socket:
        await ask(socket, **body)
        *frames, done = await frames_until(socket, "done")
    assert done == {"type": "done"}
    texts = [choice["delta"].get("content", "") for one in frames for choice in one["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]


def _without(frame: Frame, names: tuple[str, ...]) -> Frame:
    return {name: value for name, value in frame.items() if name not in names}
