"""The HTTP client against real sockets: whole answers, streams, kept connections, and what it never sends."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

import pytest

from ridgeline.proxy.answer import HIGH_WATER
from ridgeline.proxy.connection import Connection
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url
from tests.patience import PATIENCE_S
from tests.proxy.asking import HEAD, PATIENT, ask
from tests.proxy.scripted import (
    Request,
    Wire,
    replies,
    resets,
    scripted,
    sends,
    sends_then_closes,
    sends_then_resets,
    streams,
)

# ── whole answers ──


async def test_a_request_arrives_as_it_was_given_and_its_answer_comes_back(client: HttpClient) -> None:
    async with scripted(replies(201, b'{"a":1}', "X-Trace: t1")) as upstream:
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"req_1")]
        answer = await client.ask(
            read_url(upstream.url + "/base"), "POST", "/v1/x?y=1", headers, b'{"q":2}', timeouts=PATIENT
        )
        assert (answer.status, await answer.read(100)) == (201, b'{"a":1}')
        assert answer.header(b"x-trace") == b"t1"
        got = upstream.requests[0]
    assert (got.method, got.path, got.body) == ("POST", "/base/v1/x?y=1", b'{"q":2}')
    assert got.headers == {
        "host": f"127.0.0.1:{upstream.port}",
        "content-type": "application/json",
        "x-request-id": "req_1",
        "content-length": "7",
    }


async def test_a_get_has_no_length_and_an_empty_post_has(client: HttpClient) -> None:
    async with scripted(replies(200)) as upstream:
        await client.ask(read_url(upstream.url), "GET", "/ready", [], timeouts=PATIENT)
        await client.ask(read_url(upstream.url), "POST", "/v1/x", [], timeouts=PATIENT)
        assert ["content-length" in request.headers for request in upstream.requests] == [False, True]


async def test_one_connection_serves_many_requests_in_turn(client: HttpClient) -> None:
    async with scripted(replies(200), streams(b"a", b"b"), replies(404), replies(200)) as upstream:
        origin = read_url(upstream.url)
        bodies = [await (await ask(client, origin)).read(100) for _ in range(4)]
        assert bodies == [b"{}", b"ab", b"{}", b"{}"]
        assert upstream.connections == 1


async def test_requests_at_once_have_connections_of_their_own(client: HttpClient) -> None:
    async def echoes(request: Request, wire: Wire) -> None:
        await asyncio.sleep(0.02)
        await wire.answer(200, request.body)

    async with scripted(echoes) as upstream:
        origin = read_url(upstream.url)

        async def one(number: int) -> bytes:
            return await (await ask(client, origin, b"%d" % number)).read(100)

        assert await asyncio.gather(*(one(number) for number in range(20))) == [b"%d" % n for n in range(20)]
        assert upstream.connections == 20
        assert client.pool.idle_connections(origin) == 20


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"\r\nto the end",
        b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nto the end",
        HEAD + b"connection: close\r\ncontent-length: 10\r\n\r\nto the end",
        HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\na\r\nto the end\r\n0\r\n\r\n",
    ],
)
async def test_a_connection_that_ends_with_its_answer_is_not_used_again(
    client: HttpClient, raw: bytes
) -> None:
    async with scripted(sends_then_closes(raw)) as upstream:
        origin = read_url(upstream.url)
        for _ in range(2):
            assert await (await ask(client, origin)).read(100) == b"to the end"
        assert client.pool.idle_connections(origin) == 0
        assert upstream.connections == 2


async def test_interim_answers_are_passed_over(client: HttpClient) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with scripted(sends(interim + whole)) as upstream:
        answer = await ask(client, upstream)
        assert (answer.status, answer.headers) == (200, [(b"content-length", b"2")])
        assert await answer.read(100) == b"ok"


async def test_answers_without_a_body_end_at_once(client: HttpClient) -> None:
    async with scripted(
        sends(b"HTTP/1.1 204 No Content\r\n\r\n"), sends(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    ) as upstream:
        for status in (204, 304):
            answer = await ask(client, upstream)
            assert (answer.status, await answer.read(1)) == (status, b"")


async def test_a_redirect_is_an_answer_like_any_other(client: HttpClient) -> None:
    async with scripted(replies(302, b"", "location: http://127.0.0.1:1/")) as upstream:
        answer = await ask(client, upstream)
        assert answer.status == 302
        assert len(upstream.requests) == 1


async def test_headers_about_the_connection_are_not_handed_on(client: HttpClient) -> None:
    raw = HEAD + b"Connection: keep-alive\r\nKeep-Alive: timeout=5\r\ncontent-length: 0\r\nA: b\r\n\r\n"
    async with scripted(sends(raw)) as upstream:
        assert (await ask(client, upstream)).headers == [(b"content-length", b"0"), (b"a", b"b")]


async def test_a_large_body_goes_both_ways(client: HttpClient) -> None:
    async def echoes(request: Request, wire: Wire) -> None:
        await wire.answer(200, request.body)

    body = bytes(range(256)) * 20_000
    async with scripted(echoes) as upstream:
        assert await (await ask(client, upstream, body)).read(len(body)) == body


# ── streams ──


async def test_a_streams_pieces_come_as_they_are_sent(client: HttpClient) -> None:
    gate = asyncio.Event()

    async def script(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.chunk(b"one")
        await gate.wait()
        await wire.chunk(b"two")
        await wire.end_chunks()

    async with scripted(script) as upstream:
        answer = await ask(client, upstream, wait_for_body=True)
        assert answer.take() == b"one"
        gate.set()
        assert (await answer.next(), await answer.next()) == (b"two", None)


async def test_any_split_of_the_bytes_is_the_same_answer(client: HttpClient) -> None:
    chunks = b"5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
    raw = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks

    async def dribbles(request: Request, wire: Wire) -> None:
        for position in range(len(raw)):
            await wire.send(raw[position : position + 1])
            await asyncio.sleep(0)
        await wire.gone()

    async with scripted(dribbles) as upstream:
        answer = await ask(client, upstream)
        assert await answer.read(100) == b"hello!"
        assert answer.headers == []


async def test_relay_hands_over_every_piece_and_returns_at_the_end(client: HttpClient) -> None:
    async with scripted(streams(b"a", b"b", b"c")) as upstream:
        answer = await ask(client, upstream, wait_for_body=True)
        pieces: list[bytes] = []
        await answer.relay(pieces.append)
        assert b"".join(pieces) == b"abc"
        assert client.pool.idle_connections(read_url(upstream.url)) == 0  # another origin object
        assert not client.pool.live


async def test_what_a_sink_raises_ends_the_answer_and_comes_out(client: HttpClient) -> None:
    async def script(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.chunk(b"a")
        await asyncio.sleep(0.01)
        await wire.chunk(b"b")
        await wire.gone()
        wire.close()

    def sink(piece: bytes) -> None:
        if b"b" in piece:
            raise ZeroDivisionError

    async with scripted(script) as upstream:
        answer = await ask(client, upstream, wait_for_body=True)
        with pytest.raises(ZeroDivisionError):
            await answer.relay(sink)
        await upstream.until(lambda: upstream.open == 0)


async def test_a_reader_that_falls_behind_stops_the_upstream(client: HttpClient) -> None:
    sent = 0

    async def floods(request: Request, wire: Wire) -> None:
        nonlocal sent
        await wire.begin_chunks()
        for _ in range(400):
            await wire.chunk(b"x" * 65536)
            sent += 65536
        await wire.end_chunks()

    async with scripted(floods) as upstream:
        answer = await ask(client, upstream, timeouts=Timeouts(PATIENCE_S, PATIENCE_S, 0.2))
        await upstream.until(lambda: answer.is_paused)
        await asyncio.sleep(0.3)
        assert sent < 400 * 65536
        assert answer.is_paused  # and the silence is not taken for the upstream's
        size = 0
        while (piece := await answer.next()) is not None:
            assert len(piece) <= HIGH_WATER + (1 << 20)
            size += len(piece)
        assert size == 400 * 65536


# ── kept connections ──


async def test_a_post_on_a_kept_connection_that_dies_is_not_sent_again(client: HttpClient) -> None:
    # The second request's connection is closed as it arrives: its server may have executed it.
    async with scripted(replies(200), resets, replies(200, b"again")) as upstream:
        origin = read_url(upstream.url)
        await (await ask(client, origin)).read(10)
        with pytest.raises(RequestBroken) as failure:
            await ask(client, origin)
        assert failure.value.cause == "stale"
        assert [request.connection for request in upstream.requests] == [1, 1]


async def test_a_get_on_a_kept_connection_that_dies_is_sent_again(client: HttpClient) -> None:
    async with scripted(replies(200), resets, replies(200, b"again")) as upstream:
        origin = read_url(upstream.url)
        await (await ask(client, origin)).read(10)
        answer = await client.ask(origin, "GET", "/v1/x", [], timeouts=PATIENT)
        assert await answer.read(10) == b"again"
        assert [request.connection for request in upstream.requests] == [1, 1, 2]


async def test_a_connection_that_its_server_has_closed_is_not_used_again(client: HttpClient) -> None:
    wires: list[Wire] = []

    async def keeps(request: Request, wire: Wire) -> None:
        wires.append(wire)
        await wire.answer(200)

    async with scripted(keeps) as upstream:
        origin = read_url(upstream.url)
        await (await ask(client, origin)).read(10)
        # The kernel has the close before the event loop sees it: nothing is awaited in between.
        with socket.socket(fileno=os.dup(wires[0].writer.get_extra_info("socket").fileno())) as server_side:
            server_side.shutdown(socket.SHUT_WR)
        answer = await ask(client, origin)
        assert (answer.status, [one.connection for one in upstream.requests]) == (200, [1, 2])


async def test_a_keep_alive_timeout_that_the_server_announces_is_obeyed(client: HttpClient) -> None:
    async with scripted(replies(200, b"{}", "Keep-Alive: timeout=1, max=100")) as upstream:
        origin = read_url(upstream.url)
        for _ in range(2):
            await (await ask(client, origin)).read(10)
        assert [request.connection for request in upstream.requests] == [1, 2]


async def test_a_new_connection_that_dies_is_not_replaced(client: HttpClient) -> None:
    async with scripted(resets, replies(200)) as upstream:
        with pytest.raises(RequestBroken):
            await ask(client, upstream)
        assert len(upstream.requests) == 1


async def test_a_kept_connection_that_died_in_its_answer_is_not_replaced(client: HttpClient) -> None:
    async with scripted(replies(200), sends_then_resets(b"HTTP/1.1 2"), replies(200)) as upstream:
        origin = read_url(upstream.url)
        await (await ask(client, origin)).read(10)
        with pytest.raises(RequestBroken):
            await ask(client, origin)
        assert len(upstream.requests) == 2


async def test_an_unused_connection_is_closed_after_a_while() -> None:
    client = HttpClient()
    async with scripted(replies(200)) as upstream:
        origin = read_url(upstream.url, keep_alive_s=0.5)
        await (await ask(client, origin)).read(10)
        assert client.pool.idle_connections(origin) == 1
        await upstream.until(lambda: upstream.open == 0)
        assert client.pool.idle_connections(origin) == 0
    client.close()


async def test_an_early_answer_to_a_body_still_being_sent_leaves_no_kept_connection(
    client: HttpClient,
) -> None:
    async def refuses_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(refuses_early, "127.0.0.1", 0, limit=1024)
    async with server:
        origin = read_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        answer = await ask(client, origin, b"x" * 30_000_000)
        assert (answer.status, await answer.read(10)) == (413, b"big")
        assert client.pool.idle_connections(origin) == 0


async def test_a_closed_connection_is_freed_without_the_collector(client: HttpClient) -> None:
    def connections() -> int:
        return sum(isinstance(one, Connection) for one in gc.get_objects())

    closing = HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok"
    gc.collect()
    before = connections()
    async with scripted(sends_then_closes(closing)) as upstream:
        gc.disable()
        try:
            for _ in range(5):
                await (await ask(client, upstream)).read(10)
            await upstream.until(lambda: connections() == before)
        finally:
            gc.enable()
