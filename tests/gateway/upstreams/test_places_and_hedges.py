"""Places at upstreams, and second requests that overtake the first: none is left behind."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.gateway.errors import Limited
from tests.gateway.upstreams.several import gateway
from tests.proxy.scripted import (
    Request,
    Wire,
    hangs,
    replies,
    sends,
    streams,
)

# ── places ──


async def test_more_requests_than_places_wait_for_their_turn() -> None:
    running = most = 0

    async def counts(request: Request, wire: Wire) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await g.servers[0].until(lambda: most >= 3)
        await asyncio.sleep(0.01)  # one too many would come now
        running -= 1
        await wire.answer(200, b"ok")

    async with gateway([counts], max_concurrent=3) as g:
        assert await asyncio.gather(*(g.body() for _ in range(12))) == [b"ok"] * 12
        assert most == 3
        await g.at_rest()


async def test_a_full_queue_goes_to_another_target_or_is_a_429() -> None:
    async with gateway([hangs], [replies(200, b"b")], max_concurrent=1, max_waiting=1) as g:
        tasks = [asyncio.create_task(g.open("a")) for _ in range(2)]
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 1)
        assert await g.body("ab") == b"b"
        error = await g.error("a")
        assert isinstance(error, Limited)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await g.at_rest()


async def test_a_wait_for_a_turn_has_an_end() -> None:
    async with gateway([hangs], max_concurrent=1, queue_timeout_s=0.05) as g:
        task = asyncio.create_task(g.open())
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 1)
        assert isinstance(await g.error(), Limited)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_cancelled_callers_leave_no_place_and_no_connection() -> None:
    async with gateway([hangs], max_concurrent=2) as g:
        tasks = [asyncio.create_task(g.open()) for _ in range(5)]
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await g.at_rest()
        await g.servers[0].until(lambda: g.servers[0].open == 0)


async def test_a_caller_cancelled_between_two_tries_leaves_nothing() -> None:
    async with gateway([replies(500)], retries={"backoff_ms": 60_000.0, "backoff_max_ms": 60_000.0}) as g:
        task = asyncio.create_task(g.open())
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 1)
        await g.servers[0].until(lambda: g.is_at_rest)  # a place is not held while nothing is sent
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_abort_frees_place_and_socket_at_once() -> None:
    async with gateway([sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")]) as g:
        opened = await g.open(stream=True)
        opened.abort()
        await g.at_rest()
        await g.servers[0].until(lambda: g.servers[0].open == 0)
        opened.close(False)  # comes too late to count
        assert g.state().failures == 0
        await g.at_rest()


# ── hedging ──


async def test_a_slow_target_is_overtaken_and_its_request_aborted() -> None:
    async with gateway([hangs], [streams(b"b")]) as g:
        opened = await g.open(stream=True, hedge_after_s=0.05)
        assert (opened.target.upstream, opened.first) == ("b", b"b")
        await g.servers[0].until(lambda: g.servers[0].open == 0)
        assert [(one.upstream, one.kind, one.cause) for one in g.attempts] == [
            ("b", "hedge", ""),
            ("a", "first", "cancelled"),
        ]
        while await opened.next() is not None:
            pass
        opened.close(True)
        await g.at_rest()


async def test_a_hedge_that_comes_to_nothing_leaves_the_first_its_time() -> None:
    refused = asyncio.Event()

    async def slow(request: Request, wire: Wire) -> None:
        await refused.wait()
        await wire.answer(200, b"a")

    async def refuses(request: Request, wire: Wire) -> None:
        await wire.answer(500)
        refused.set()

    async with gateway([slow], [refuses], retries={"retries": 0}) as g:
        assert await g.body(hedge_after_s=0.03) == b"a"
        assert sorted((one.upstream, one.kind) for one in g.attempts) == [("a", "first"), ("b", "hedge")]
        await g.at_rest()


async def test_a_fast_first_target_is_not_hedged_and_a_failed_one_falls_back() -> None:
    async with gateway([replies(200, b"a")], [replies(200, b"b")]) as g:
        assert await g.body(hedge_after_s=60.0) == b"a"
        assert not g.servers[1].requests
    async with gateway([replies(500)], [replies(200, b"b")], retries={"retries": 0}) as g:
        assert await g.body(hedge_after_s=60.0) == b"b"
        assert g.kinds == ["first", "fallback"]
        assert g.upstreams.retries == (0, 0)


async def test_hedges_count_against_the_budget() -> None:
    async def slow(request: Request, wire: Wire) -> None:
        await asyncio.sleep(0.03)
        await wire.answer(200, b"a")

    none = {"budget_ratio": 0.0, "budget_per_s": 0.0}
    async with gateway([slow], [replies(200, b"b")], retries=none) as g:
        assert await g.body(hedge_after_s=0.005) == b"a"
        assert not g.servers[1].requests
        assert g.upstreams.retries == (0, 1)


async def test_a_cancelled_hedge_leaves_nothing_at_either() -> None:
    async with gateway([hangs], [hangs]) as g:
        task = asyncio.create_task(g.open(hedge_after_s=0.02))
        await g.servers[1].until(lambda: bool(g.servers[1].requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for server in g.servers:
            await server.until(lambda server=server: server.open == 0)  # type: ignore[misc]
        await g.at_rest()
