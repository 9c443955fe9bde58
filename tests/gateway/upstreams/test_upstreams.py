"""Every rule of retries, fallbacks, keys and places, against real listeners that fail as scripted."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ridgeline.gateway.errors import BadRequest, GatewayError, Limited, UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams.answer import UpstreamBroken
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.opened import Attempt, Opened
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams, drawn
from tests.gateway.upstreams.scripted import (
    Request,
    Script,
    Scripted,
    Wire,
    hangs,
    refusing_port,
    replies,
    resets,
    scripted,
    sends,
    sends_then_closes,
    sends_then_resets,
    streams,
)

# Waits are short, the breaker is out of the way, the budget is large: each test narrows what it is about.
CALM = {
    "backoff_ms": 2.0,
    "backoff_max_ms": 20.0,
    "budget_ratio": 1.0,
    "budget_per_s": 1000.0,
    "breaker_failures": 1000,
}


class Clock:
    """The real one, set forward by a test instead of waiting."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Gateway:
    """Upstreams a, b, … each with its scripted server."""

    def __init__(self, upstreams: Upstreams, servers: Sequence[Scripted], names: str, clock: Clock) -> None:
        self.upstreams, self.servers, self.names, self.clock = upstreams, servers, names, clock
        self.attempts: list[Attempt] = []

    async def open(self, names: str | None = None, **options: Any) -> Opened:
        stream = options.pop("stream", False)
        outgoing = Outgoing("POST", "/v1/chat/completions", [(b"x-request-id", b"r1")], b"{}", stream)
        options.setdefault("deadline", self.clock() + 10)
        options.setdefault("prepare", lambda target: outgoing)
        self.attempts = []
        return await self.upstreams.open(
            [Target(name, "m") for name in names or self.names],
            options.pop("prepare"),
            tenant="t",
            attempts=self.attempts,
            **options,
        )

    async def body(self, names: str | None = None, **options: Any) -> bytes:
        opened = await self.open(names, **options)
        body = opened.first + await opened.answer.read(1 << 20)
        opened.close(True)
        return body

    async def error(self, names: str | None = None, **options: Any) -> GatewayError:
        with pytest.raises(GatewayError) as failure:
            await self.open(names, **options)
        return failure.value

    @property
    def causes(self) -> list[str]:
        return [attempt.cause for attempt in self.attempts]

    @property
    def kinds(self) -> list[str]:
        return [attempt.kind for attempt in self.attempts]

    def state(self, name: str = "a") -> Any:
        return next(state for state in self.upstreams.snapshot() if state.name == name)

    async def at_rest(self) -> None:
        """No place is held, no connection is open but kept ones."""
        assert [(state.inflight, state.waiting) for state in self.upstreams.snapshot()] == [
            (0, 0) for _ in self.names
        ]
        assert not self.upstreams._client.live


@contextlib.asynccontextmanager
async def gateway(
    *scripts: Sequence[Script], retries: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Gateway]:
    """A list of scripts for each upstream: a, b, …"""
    names = "abcd"[: len(scripts)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted(*each)) for each in scripts]
        configs = [
            UpstreamConfig(**{"name": name, "url": server.url, "first_byte_timeout_s": 5.0, **config})
            for name, server in zip(names, servers, strict=True)
        ]
        clock = Clock()
        upstreams = Upstreams(configs, RetryConfig(**{**CALM, **(retries or {})}), clock=clock)
        yield Gateway(upstreams, servers, names, clock)
        await upstreams.stop()


# ── what is retried ──


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (replies(500), "http_500"),
        (replies(503), "http_503"),
        (replies(529), "http_529"),
        (resets, "reset"),
        (sends_then_closes(b""), "reset"),
        (sends_then_closes(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"), "truncated"),
        (sends_then_closes(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"), "truncated"),
        (sends_then_closes(b"nonsense\r\n\r\n"), "garbage"),
        (replies(408), "http_408"),
        (replies(409), "http_409"),
    ],
)
async def test_what_fails_before_the_first_byte_is_retried_unseen(failure: Script, cause: str) -> None:
    async with gateway([failure, failure, replies(200, b"ok")]) as g:
        assert await g.body() == b"ok"
        assert g.causes == [cause, cause, ""]
        assert g.kinds == ["first", "retry", "retry"]
        await g.at_rest()


@pytest.mark.parametrize("status", [400, 404, 405, 413, 415, 422, 431, 451])
async def test_a_refusal_is_an_answer(status: int) -> None:
    async with gateway([replies(status, b"no")], [replies(200)]) as g:
        opened = await g.open()
        assert (opened.answer.status, await opened.answer.read(10)) == (status, b"no")
        assert len(g.servers[0].requests) == 1
        assert not g.servers[1].requests
        opened.close(True)
        await g.at_rest()


@pytest.mark.parametrize("status", [408, 409])
async def test_a_passing_refusal_is_the_answer_once_retries_are_used_up(status: int) -> None:
    async with gateway([replies(status, b"no")], retries={"retries": 1}) as g:
        opened = await g.open()
        assert (opened.answer.status, await opened.answer.read(10)) == (status, b"no")
        assert len(g.servers[0].requests) == 2
        opened.close(True)


async def test_a_redirect_is_not_followed_and_not_retried() -> None:
    async with gateway([replies(302, b"", "location: http://127.0.0.1:9/")]) as g:
        error = await g.error()
        assert (error.status, g.causes) == (502, ["http_302"])


async def test_nothing_is_sent_again_once_the_body_has_begun() -> None:
    half = sends_then_resets(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
    async with gateway([half, replies(200)], [replies(200)]) as g:
        opened = await g.open(stream=True)
        assert opened.first == b"hello"
        with pytest.raises(UpstreamBroken):
            await opened.answer.next()
        opened.close(False)
        assert [len(server.requests) for server in g.servers] == [1, 0]
        assert g.state().failures == 1
        await g.at_rest()


async def test_a_stream_begins_with_the_first_of_its_body() -> None:
    async with gateway([streams(b"one", b"two")]) as g:
        opened = await g.open(stream=True)
        assert opened.first.startswith(b"one")
        assert opened.answer.status == 200
        rest = b""
        while (piece := await opened.answer.next()) is not None:
            rest += piece
        assert opened.first + rest == b"onetwo"
        opened.close(True)
        await g.at_rest()


async def test_when_every_try_fails_the_client_hears_of_the_upstream_and_not_of_its_address() -> None:
    async with gateway([replies(500, b"secret detail")]) as g:
        error = await g.error()
        assert isinstance(error, UpstreamFailed)
        assert (error.status, error.code) == (502, "upstream_failed")
        assert len(g.attempts) == 3
        assert "secret" not in error.message
        assert "127.0.0.1" not in error.message
        await g.at_rest()


async def test_nobody_listens() -> None:
    async with gateway([replies(200)]) as g:
        gone = Upstreams(
            [UpstreamConfig(name="a", url=f"http://127.0.0.1:{refusing_port()}")], RetryConfig(**CALM)
        )
        g.upstreams = gone
        error = await g.error()
        assert (error.status, g.causes) == (502, ["refused"] * 3)
        await gone.stop()


async def test_an_upstream_that_never_answers_is_not_asked_twice() -> None:
    async with gateway([hangs], first_byte_timeout_s=0.1) as g:
        error = await g.error()
        assert isinstance(error, UpstreamTimeout | UpstreamBroken)
        assert (error.status, error.code, g.causes) == (504, "upstream_timeout", ["first_byte_timeout"])
        await g.at_rest()


async def test_the_requests_own_deadline_ends_it() -> None:
    async with gateway([hangs], [replies(200)]) as g:
        error = await g.error(deadline=time.monotonic() + 0.15)
        assert isinstance(error, UpstreamTimeout)
        assert not g.servers[1].requests  # its time is over there too
        await g.at_rest()


async def test_a_wait_that_the_deadline_does_not_allow_is_not_begun() -> None:
    async with gateway([replies(500)], retries={"backoff_ms": 60_000.0, "backoff_max_ms": 60_000.0}) as g:
        error = await g.error()
        assert (error.status, len(g.attempts)) == (502, 1)


# ── waits ──


async def test_a_retry_after_a_failure_waits_and_uses_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K1", "one")
    monkeypatch.setenv("K2", "two")
    scripts = [replies(500), replies(500), replies(200)]
    async with gateway(scripts, key_env=("K1", "K2")) as g:
        await g.body()
        sent = [request.headers["authorization"] for request in g.servers[0].requests]
        assert len(set(sent)) == 1
        first, second = g.attempts[1].waited_s, g.attempts[2].waited_s
        assert 0.0016 <= first <= 0.0024
        assert 0.0032 <= second <= 0.0048


async def test_retry_after_of_a_failure_is_waited_for() -> None:
    async with gateway([replies(503, b"", "retry-after-ms: 30"), replies(200)]) as g:
        await g.body()
        assert g.attempts[1].waited_s >= 0.029


async def test_a_retry_after_that_is_too_long_is_not_waited_for() -> None:
    async with gateway([replies(503, b"", "retry-after: 100")], [replies(200, b"b")]) as g:
        assert await g.body() == b"b"
        assert g.kinds == ["first", "fallback"]


# ── keys ──


@pytest.fixture
def two_keys(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("K1", "one")
    monkeypatch.setenv("K2", "two")
    return ("K1", "K2")


def by_key(**scripts: Script) -> Script:
    """Answers by which key is sent."""

    async def script(request: Request, wire: Wire) -> None:
        await scripts[request.headers["authorization"].removeprefix("Bearer ")](request, wire)

    return script


async def test_a_rate_limit_rotates_the_key_and_backs_off(two_keys: tuple[str, ...]) -> None:
    script = by_key(one=replies(429, b"", "retry-after: 60"), two=replies(200, b"ok"))
    async with gateway([script], key_env=two_keys) as g:
        assert await g.body() == b"ok"
        assert [(one.credential, one.status) for one in g.attempts] == [("K1", 429), ("K2", 200)]
        assert g.attempts[1].waited_s >= 0.0016
        assert g.state().credentials == {"usable": 1, "resting": 1, "dead": 0}
        assert await g.body() == b"ok"  # and the one that rests is left alone
        assert [one.credential for one in g.attempts] == ["K2"]


async def test_a_rate_limit_with_one_key_waits_for_retry_after() -> None:
    async with gateway([replies(429, b"", "retry-after-ms: 40"), replies(200, b"ok")]) as g:
        assert await g.body() == b"ok"
        assert g.attempts[1].waited_s >= 0.039


async def test_a_rate_limit_everywhere_is_a_429_with_the_soonest_retry_after() -> None:
    async with gateway([replies(429, b"", "retry-after: 90")], [replies(429, b"", "retry-after: 40")]) as g:
        error = await g.error()
        assert isinstance(error, Limited)
        assert error.headers["retry-after"] == "40"
        assert [len(server.requests) for server in g.servers] == [1, 1]
        again = await g.error()  # known: nobody is asked
        assert isinstance(again, Limited)
        assert [len(server.requests) for server in g.servers] == [1, 1]
        assert g.attempts == []


async def test_a_request_waits_for_a_rest_that_is_short() -> None:
    async with gateway(
        [replies(429, b"", "retry-after-ms: 400"), replies(200, b"ok")], retries={"retries": 0}
    ) as g:
        assert isinstance(await g.error(), Limited)
        assert await g.body() == b"ok"
        assert g.attempts[0].waited_s > 0


async def test_a_rate_limit_goes_to_another_target_if_no_key_is_left() -> None:
    async with gateway([replies(429, b"", "retry-after: 5")], [replies(200, b"b")]) as g:
        assert await g.body() == b"b"
        assert (g.kinds, g.causes) == (["first", "fallback"], ["http_429", ""])


@pytest.mark.parametrize("status", [401, 402, 403])
async def test_a_refused_key_is_dead_and_another_is_used_at_once(
    status: int, two_keys: tuple[str, ...]
) -> None:
    script = by_key(one=replies(status), two=replies(200, b"ok"))
    async with gateway(
        [script], key_env=two_keys, retries={"retries": 0, "budget_ratio": 0, "budget_per_s": 0}
    ) as g:
        assert await g.body() == b"ok"
        assert [(one.credential, one.status, one.waited_s) for one in g.attempts] == [
            ("K1", status, 0.0),
            ("K2", 200, 0.0),
        ]
        for _ in range(3):
            await g.body()
            assert [one.credential for one in g.attempts] == ["K2"]


async def test_a_key_that_may_not_use_a_model_is_dead_for_that_model_alone(two_keys: tuple[str, ...]) -> None:
    async with gateway([replies(403), replies(403), replies(200)], key_env=two_keys) as g:
        assert (await g.error()).code == "upstream_credentials_exhausted"
        assert g.state().credentials["usable"] == 2
        outgoing = Outgoing("POST", "/", [], b"", False)
        opened = await g.upstreams.open(
            [Target("a", "other")], lambda target: outgoing, tenant="t", deadline=time.monotonic() + 5
        )
        assert opened.answer.status == 200
        opened.close(True)


async def test_when_all_keys_are_dead_the_client_is_told_so(two_keys: tuple[str, ...]) -> None:
    async with gateway([replies(401)], key_env=two_keys) as g:
        error = await g.error()
        assert (error.status, error.code) == (502, "upstream_credentials_exhausted")
        assert len(g.servers[0].requests) == 2
        assert not g.upstreams.any_usable()
        await g.error()
        assert len(g.servers[0].requests) == 2  # dead ones are not sent again
        assert g.state().unusable_credentials == {"K1": "dead", "K2": "dead"}
        await g.at_rest()


async def test_dead_keys_come_back_after_a_time_or_by_a_reset(two_keys: tuple[str, ...]) -> None:
    dead, alive = replies(401), replies(200, b"ok")
    async with gateway(
        [dead, dead, dead, dead, alive], key_env=two_keys, retries={"credential_dead_s": 300.0}
    ) as g:
        await g.error()
        g.clock.ahead_s += 301
        await g.error()
        assert len(g.attempts) == 2
        g.upstreams.reset("a")
        assert await g.body() == b"ok"


async def test_dead_keys_lead_to_another_target(two_keys: tuple[str, ...]) -> None:
    async with gateway([replies(401)], [replies(200, b"b")], key_env=two_keys) as g:
        assert await g.body() == b"b"
        assert g.kinds == ["first", "rotation", "fallback"]


async def test_keys_take_turns(two_keys: tuple[str, ...]) -> None:
    async with gateway([replies(200)], key_env=two_keys) as g:
        used = []
        for _ in range(4):
            await g.body()
            used.append(g.attempts[0].credential)
        assert used == ["K1", "K2", "K1", "K2"]


async def test_a_clients_own_credentials_never_reach_an_upstream(two_keys: tuple[str, ...]) -> None:
    names = (b"authorization", b"x-api-key", b"api-key", b"cookie", b"x-kept")
    outgoing = Outgoing("POST", "/", [(name, b"clients") for name in names], b"", False)
    async with gateway([replies(200)], key_env=two_keys) as g:
        await g.body(prepare=lambda target: outgoing)
        sent = g.servers[0].requests[0]
        assert sent.headers["authorization"] == "Bearer one"
        assert sent.headers["x-kept"] == "clients"
        assert sent.raw_head.count(b"clients") == 1


async def test_anthropic_is_asked_with_its_own_headers(two_keys: tuple[str, ...]) -> None:
    async with gateway([replies(200)], key_env=two_keys, kind="anthropic") as g:
        await g.body()
        version = (b"anthropic-version", b"2024-01-01")
        outgoing = Outgoing("POST", "/v1/messages", [version], b"", False)
        await g.body(prepare=lambda target: outgoing)
        first, second = (request.headers for request in g.servers[0].requests)
        assert (first["x-api-key"], first["anthropic-version"]) == ("one", "2023-06-01")
        assert (second["x-api-key"], second["anthropic-version"]) == ("two", "2024-01-01")
        assert "authorization" not in first


# ── fallbacks ──


async def test_targets_are_asked_in_their_order() -> None:
    bad = [replies(500)]
    async with gateway(bad, bad, [replies(200, b"c")], retries={"retries": 0}) as g:
        assert await g.body() == b"c"
        assert [(one.upstream, one.kind) for one in g.attempts] == [
            ("a", "first"),
            ("b", "fallback"),
            ("c", "fallback"),
        ]


async def test_weights_draw_the_first_and_the_others_follow() -> None:
    rng = random.Random(1)
    targets = [Target("a", "m", 3.0), Target("b", "m", 1.0)]
    orders = [[target.upstream for target in drawn(targets, rng)] for _ in range(4000)]
    assert all(sorted(order) == ["a", "b"] for order in orders)
    assert 0.70 < sum(order[0] == "a" for order in orders) / 4000 < 0.80


async def test_a_target_that_cannot_carry_the_request_is_passed_over() -> None:
    outgoing = Outgoing("POST", "/", [], b"", False)

    def prepare(target: Target) -> Outgoing:
        if target.upstream == "a":
            raise BadRequest("logit_bias: cannot be carried", param="logit_bias")
        return outgoing

    async with gateway([replies(200, b"a")], [replies(200, b"b")]) as g:
        assert await g.body(prepare=prepare) == b"b"
        error = await g.error("a", prepare=prepare)
        assert (error.status, error.param) == (400, "logit_bias")
        await g.at_rest()


async def test_what_prepare_raises_otherwise_comes_out_and_frees_the_place() -> None:
    def prepare(target: Target) -> Outgoing:
        raise ZeroDivisionError

    async with gateway([replies(200)], [replies(200)]) as g:
        with pytest.raises(ZeroDivisionError):
            await g.open(prepare=prepare)
        await g.at_rest()


# ── budget and breaker ──


async def test_retries_stay_within_their_budget_in_an_outage() -> None:
    tight = {"budget_ratio": 0.1, "budget_per_s": 0.0, "retries": 2}
    async with gateway([replies(500)], retries=tight) as g:
        for _ in range(200):
            await g.error()
        retries = len(g.servers[0].requests) - 200
        assert 20 <= retries <= 30  # a tenth, and the ten that the budget begins with
        assert g.upstreams.retries[0] == retries


async def test_an_open_breaker_spares_the_upstream_and_a_trial_closes_it() -> None:
    settings = {"breaker_failures": 3, "breaker_open_s": 30.0, "retries": 0}
    bad = replies(500)
    async with gateway([bad, bad, bad, replies(200, b"a")], [replies(200, b"b")], retries=settings) as g:
        for _ in range(3):
            assert await g.body() == b"b"
        assert g.state().breaker == "open"
        for _ in range(5):
            assert await g.body() == b"b"
            assert g.kinds == ["fallback"]
        assert len(g.servers[0].requests) == 3
        g.clock.ahead_s += 31
        assert g.state().breaker == "half_open"
        assert await g.body() == b"a"
        assert g.state().breaker == "closed"


async def test_all_breakers_open_is_said_at_once_with_a_time() -> None:
    async with gateway([replies(500)], retries={"breaker_failures": 2, "breaker_open_s": 30.0}) as g:
        await g.error()
        error = await g.error()
        assert (error.status, error.code) == (503, "upstream_unavailable")
        assert 1 <= int(error.headers["retry-after"]) <= 30
        assert g.attempts == []
        assert len(g.servers[0].requests) == 2
        assert not g.upstreams.any_usable()


async def test_a_cancelled_trial_lets_another_try() -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 30.0, "retries": 0}
    async with gateway([replies(500), hangs, replies(200, b"ok")], retries=settings) as g:
        await g.error()
        g.clock.ahead_s += 31
        task = asyncio.create_task(g.open())
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await g.body() == b"ok"


async def test_rate_limits_and_refusals_do_not_open_the_breaker() -> None:
    async with gateway([replies(429)], [replies(404)], retries={"breaker_failures": 1, "retries": 0}) as g:
        await g.error("a")
        await g.body("b")
        assert [state.breaker for state in g.upstreams.snapshot()] == ["closed", "closed"]


# ── places ──


async def test_more_requests_than_places_wait_for_their_turn() -> None:
    running = most = 0

    async def counts(request: Request, wire: Wire) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
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
    async with gateway([replies(500)], retries={"backoff_ms": 5000.0, "backoff_max_ms": 5000.0}) as g:
        task = asyncio.create_task(g.open())
        await g.servers[0].until(lambda: len(g.servers[0].requests) == 1)
        await asyncio.sleep(0.02)
        await g.at_rest()  # a place is not held while nothing is sent
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
        while await opened.answer.next() is not None:
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
        assert await g.body(hedge_after_s=5.0) == b"a"
        assert not g.servers[1].requests
    async with gateway([replies(500)], [replies(200, b"b")], retries={"retries": 0}) as g:
        assert await g.body(hedge_after_s=5.0) == b"b"
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
