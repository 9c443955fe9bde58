"""The HTTP client where answers break off, never come, or are wanted no longer."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from ridgeline.proxy.body import StoredBody, Stretch
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url
from ridgeline.proxy.pool import ClientLimits
from tests.patience import PATIENCE_S
from tests.proxy.asking import HEAD, ask, cause_of
from tests.proxy.scripted import (
    Request,
    Wire,
    hangs,
    refusing_port,
    resets,
    scripted,
    sends,
    sends_then_closes,
    sends_then_resets,
)

# ── failures ──


async def test_nobody_listens(client: HttpClient) -> None:
    with pytest.raises(RequestBroken, match="refused"):
        await ask(client, read_url(f"http://127.0.0.1:{refusing_port()}"))


async def test_a_name_that_nobody_has(client: HttpClient) -> None:
    with pytest.raises(RequestBroken) as failure:
        await ask(client, read_url("http://nobody.invalid"))
    assert failure.value.cause in ("unresolved", "unreachable")


class ShortFile:
    """A file that was cut after its length was read."""

    path = Path("cut")

    def read(self, begin: int, size: int) -> bytes:
        return b"x" * (size - 1)


async def test_a_body_on_disk_that_cannot_be_read_fails_its_request(client: HttpClient) -> None:
    body = StoredBody([b"before", Stretch(ShortFile(), 0, 1000)])
    assert await cause_of(client, hangs, body=body) == "upload_lost"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 200 O", "reset"),
        (HEAD + b"content-length: 10\r\n\r\nhalf", "truncated"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nwo", "truncated"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "truncated"),
        (b"SSH-2.0-OpenSSH_9\r\n", "garbage"),
        (HEAD + b"content-length: x\r\n\r\n", "garbage"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "garbage"),
        (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "garbage"),
        (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc", "garbage"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "garbage"),
        (HEAD + b"a: " + b"x" * 70_000 + b"\r\n\r\n", "head_too_large"),
        (HEAD + b"a: b\r\n" * 300 + b"\r\n", "head_too_large"),
        (HEAD + b"content-length: 9999999999999\r\n\r\n", "body_too_large"),
    ],
)
async def test_an_answer_that_is_none(client: HttpClient, raw: bytes, cause: str) -> None:
    assert await cause_of(client, sends_then_closes(raw), read=True) == cause


async def test_a_reset_in_the_middle_is_no_end(client: HttpClient) -> None:
    assert await cause_of(client, sends_then_resets(HEAD + b"\r\nuntil the close"), read=True) == "truncated"
    assert await cause_of(client, resets) == "reset"


async def test_endless_trailers_and_interim_answers_are_given_up(client: HttpClient) -> None:
    async def endless(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.send(b"1\r\n.\r\n0\r\nx: ")
        while True:
            await wire.send(b"y" * 10_000)

    async def interim(request: Request, wire: Wire) -> None:
        while True:
            await wire.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)

    assert await cause_of(client, endless, read=True) == "garbage"
    assert await cause_of(client, interim, read=True) == "head_too_large"


async def test_a_body_larger_than_allowed_is_given_up() -> None:
    client = HttpClient(ClientLimits(body_bytes=1000))

    async def endless(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        while True:
            await wire.chunk(b"y" * 100)

    assert await cause_of(client, endless, read=True) == "body_too_large"
    client.close()


async def test_reading_with_a_limit_gives_up_what_is_larger(client: HttpClient) -> None:
    async def endless(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        while True:
            await wire.chunk(b"y" * 100)

    async with scripted(endless) as upstream:
        answer = await ask(client, upstream)
        with pytest.raises(RequestBroken, match="too large"):
            await answer.read(1000)
        await upstream.until(lambda: upstream.open == 0)


async def test_bytes_behind_an_answer_spoil_only_the_connection(client: HttpClient) -> None:
    twice = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" * 2
    async with scripted(sends(twice)) as upstream:
        origin = read_url(upstream.url)
        for _ in range(2):
            assert await (await ask(client, origin)).read(100) == b"ok"
        assert client.pool.idle_connections(origin) == 0
        assert upstream.connections == 2


# ── deadlines ──


@pytest.mark.parametrize(
    ("data", "wait_for_body", "cause"),
    [
        (b"", False, "first_byte_timeout"),
        (b"HTTP/1.1 200 OK\r\n", False, "first_byte_timeout"),
        (HEAD + b"content-length: 10\r\n\r\n", False, "first_byte_timeout"),
        (HEAD + b"content-length: 10\r\n\r\n", True, "first_byte_timeout"),
        (HEAD + b"content-length: 10\r\n\r\nhalf", True, "idle_timeout"),
    ],
)
async def test_silence_has_a_deadline(
    client: HttpClient, data: bytes, wait_for_body: bool, cause: str
) -> None:
    # Only the one that is meant is short.
    first_byte_s, idle_s = (0.15, PATIENCE_S) if cause == "first_byte_timeout" else (PATIENCE_S, 0.15)
    timeouts = Timeouts(PATIENCE_S, first_byte_s, idle_s)
    got = await cause_of(client, sends(data), read=True, timeouts=timeouts, wait_for_body=wait_for_body)
    assert got == cause


async def test_an_answer_that_keeps_coming_is_not_idle(client: HttpClient) -> None:
    async def slowly(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        for _ in range(24):
            await wire.chunk(b".")
            await asyncio.sleep(0.1)
        await wire.end_chunks()

    async with scripted(slowly) as upstream:
        answer = await ask(client, upstream, timeouts=Timeouts(PATIENCE_S, PATIENCE_S, 2.0))
        assert await answer.read(100) == b"." * 24


async def test_an_answer_that_dribbles_for_ever_meets_the_last_deadline(client: HttpClient) -> None:
    async def dribbles(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        while True:
            await wire.chunk(b".")
            await asyncio.sleep(0.01)

    until = time.monotonic() + 0.3
    assert await cause_of(client, dribbles, read=True, until=until) == "total_timeout"


async def test_a_connection_that_is_never_made_has_a_deadline(client: HttpClient) -> None:
    # A listener whose queue is full answers nothing to the next one that knocks.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        origin = read_url(f"http://127.0.0.1:{full.getsockname()[1]}")
        knocks = [socket.socket() for _ in range(4)]
        for knock in knocks:
            knock.setblocking(False)
            knock.connect_ex(full.getsockname())
        with pytest.raises(RequestBroken) as failure:
            await ask(client, origin, timeouts=Timeouts(0.2, PATIENCE_S, PATIENCE_S))
        for knock in knocks:
            knock.close()
    assert failure.value.cause == "connect_timeout"
    assert failure.value.is_timeout


# ── giving up ──


async def test_abort_closes_the_upstreams_socket_at_once(client: HttpClient) -> None:
    gone = asyncio.Event()

    async def script(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.chunk(b"a")
        await wire.gone()
        gone.set()
        wire.close()

    async with scripted(script) as upstream:
        answer = await ask(client, upstream, wait_for_body=True)
        answer.abort()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        with pytest.raises(RequestBroken, match="given up"):
            await answer.next()
        assert not client.pool.live


@pytest.mark.parametrize("stage", ["head", "body", "relay"])
async def test_a_cancelled_caller_leaves_no_connection(client: HttpClient, stage: str) -> None:
    script = hangs if stage == "head" else sends(HEAD + b"content-length: 10\r\n\r\nhalf")
    async with scripted(script) as upstream:

        async def call() -> None:
            answer = await ask(client, upstream)
            if stage == "relay":
                await answer.relay(lambda piece: None)
            await answer.read(100)

        task = asyncio.create_task(call())
        await upstream.until(lambda: bool(upstream.requests))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client.pool.live
        await upstream.until(lambda: upstream.open == 0)


async def test_more_connections_than_allowed_are_refused() -> None:
    client = HttpClient(ClientLimits(connections=2))
    async with scripted(hangs) as upstream:
        origin = read_url(upstream.url)
        tasks = [asyncio.create_task(ask(client, origin)) for _ in range(3)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert "too many connections" in str(done.pop().exception())
        assert len(waiting) == 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    client.close()
