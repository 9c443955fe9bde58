"""Connections that never become requests: heads too large or too slow, too many of them, no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from ridgeline.server.config import ServerConfig
from ridgeline.web import connection
from tests.patience import PATIENCE_S
from tests.server.scripted_client import say
from tests.server.stage import CHAT, HELLO, Stage, until

LINE = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def exchange(http: httpx.AsyncClient, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Send these bytes on a new connection, and read until it is closed."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    for part in parts:
        with contextlib.suppress(ConnectionError):
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, json.loads(body) if body else {}


@pytest.mark.parametrize(
    "parts",
    [
        [LINE + b"x: " + b"a" * 5000 + b"\r\n\r\n"],
        [LINE + b"x: ", *[b"a" * 1000] * 20],
        [b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /", *[b"a" * 1000] * 20],
        [LINE, *[b"x: y\r\n" * 100] * 20],
        [LINE + b"x: y\r\n" * 101 + b"\r\n"],
    ],
    ids=[
        "one header",
        "a header without end",
        "a path",
        "a path without end",
        "endless headers",
        "many lines",
    ],
)
async def test_a_head_too_large_is_431_and_the_connection_closed(parts: list[bytes]) -> None:
    async with Stage(config=ServerConfig(max_head_bytes=4000)).served() as http:
        status, body = await exchange(http, *parts)
        assert (status, body["error"]["code"]) == (431, "head_too_large")
        assert (await http.get("/health")).status_code == 200


async def test_a_large_body_does_not_count_as_head() -> None:
    async with Stage(config=ServerConfig(max_head_bytes=4000)).served() as http:
        for _ in range(3):
            assert (await http.post(CHAT, json={**HELLO, "user": "x" * 100_000})).status_code == 200


@pytest.mark.parametrize(
    ("said", "status"),
    [(b"", 0), (LINE, 408), (b"GET /heal", 408), (LINE + b"\r\n" + LINE, 408)],
    ids=["nothing", "half the headers", "half a line", "half of the second request"],
)
async def test_a_head_that_does_not_arrive_is_not_waited_for(said: bytes, status: int) -> None:
    async with Stage(config=ServerConfig(head_timeout_s=0.5)).served() as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(said)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)  # to the end of the connection
        writer.close()
        statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if b"HTTP/1.1 " in line]
        assert (statuses[-1] if statuses else 0) == status


async def test_a_head_that_trickles_is_cut_however_lively_it_is() -> None:
    async with Stage(config=ServerConfig(head_timeout_s=0.3)).served() as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(LINE)
                while True:
                    writer.write(b"x: y\r\n")
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        answer = await asyncio.wait_for(reader.read(4096), PATIENCE_S)
        trickling.cancel()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408")


async def test_a_stream_outlives_the_time_for_heads() -> None:
    stage = Stage(say("a long answer", pause_s=0.06), ServerConfig(head_timeout_s=0.5))
    async with stage.served() as http:
        response = await http.post(CHAT, json={**HELLO, "stream": True})
        assert response.text.endswith("data: [DONE]\n\n")


async def test_one_connection_too_many_is_503_and_leaving_makes_room() -> None:
    async with Stage(config=ServerConfig(max_connections=2)).served() as http:
        held = [await asyncio.open_connection(http.base_url.host, http.base_url.port) for _ in range(2)]
        for _, writer in held:
            writer.write(LINE)
        status, body = await exchange(http)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while (await http.get("/health", headers={"connection": "close"})).status_code != 200:
                await asyncio.sleep(0.01)


async def test_one_address_may_be_held_to_fewer() -> None:
    async with Stage(config=ServerConfig(max_connections_per_address=1)).served() as http:
        assert (await http.get("/health")).status_code == 200  # its connection stays open
        status, body = await exchange(http)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert (await http.get("/health")).status_code == 200


async def test_what_is_no_http_is_400_in_our_shape() -> None:
    async with Stage().served() as http:
        status, body = await exchange(http, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_the_rest_of_a_refused_body_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    async with Stage(config=ServerConfig(max_body_bytes=100)).served() as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 100000000\r\n\r\n".encode())
        closed = False

        async def upload() -> None:
            nonlocal closed
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b" " * 100)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            closed = True

        uploading = asyncio.create_task(upload())
        assert (await asyncio.wait_for(reader.read(4096), PATIENCE_S)).startswith(b"HTTP/1.1 413")
        await until(lambda: closed)
        await uploading
        writer.close()


HEALTH = LINE + b"\r\n"
POST = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def asked(**fields: Any) -> bytes:
    body = json.dumps({**HELLO, **fields}).encode()
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


async def statuses(http: httpx.AsyncClient, *parts: bytes) -> list[int]:
    """The statuses of all answers that these bytes get before the connection is closed."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ") if part[:3].isdigit()]


@pytest.mark.parametrize(
    "headers", [b"", b"host: a\r\nhost: b\r\n", b"connection: upgrade\r\nupgrade: websocket\r\n"]
)
async def test_http_1_1_without_one_host_is_400(headers: bytes) -> None:
    async with Stage().served() as http:
        status, body = await exchange(http, b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert "Host" in body["error"]["message"]
        assert await statuses(http, b"GET /health HTTP/1.0\r\n\r\n") == [200]


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"NO HTTP\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (LINE + b"x: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (POST + b"transfer-encoding: chunked\r\n\r\nno length\r\n", 400),
    ],
    ids=["no HTTP", "no Host", "a large head", "a bad body"],
)
async def test_requests_pipelined_before_a_bad_one_are_answered_first(bad: bytes, status: int) -> None:
    async with Stage(say("an answer", pause_s=0.02)).served() as http:
        assert await statuses(http, asked() + HEALTH + asked(stream=True) + bad) == [200, 200, 200, status]
        assert await statuses(http, asked(), HEALTH, bad) == [200, 200, status]
        assert await statuses(http, bad) == [status]


async def test_a_body_that_turns_bad_behind_its_answer_gets_no_second_one() -> None:
    async with Stage(config=ServerConfig(max_body_bytes=10)).served() as http:
        begun = POST + b"transfer-encoding: chunked\r\n\r\n" + b"14\r\n" + b"x" * 20 + b"\r\n"
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(begun)
        first = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
        writer.write(b"no length\r\n")
        rest = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        assert (first.split()[1], rest) == (b"413", b"")


async def test_a_client_that_leaves_is_noticed_though_another_request_waits_behind() -> None:
    stage = Stage(say("a long answer" * 50, pause_s=0.02))
    async with stage.served() as http:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(asked() + asked())
        await until(lambda: len(stage.client.asked) == 1)
        writer.close()
        await until(lambda: len(stage.client.aborted) == 1)
