"""What is retried, how long that waits, where it goes next, and when it ends: against real listeners."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from ridgeline.gateway.errors import BadRequest, UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.errors import UpstreamBroken
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams, drawn
from tests.gateway.upstreams.several import CALM, gateway
from tests.proxy.scripted import (
    Script,
    hangs,
    refusing_port,
    replies,
    resets,
    sends_then_closes,
    sends_then_resets,
    streams,
)

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


async def test_residency_allows_upstreams_of_its_regions_alone() -> None:
    async with gateway([replies(200, b"eu")], region="eu-west") as g:
        assert await g.body(residency=(("eu-*",),)) == b"eu"
        error = await g.error(residency=(("eu-*",), ("us-*",)))
        assert (error.status, error.code, g.attempts) == (403, "residency", [])
    async with gateway([replies(200, b"anywhere")]) as g:
        assert await g.body() == b"anywhere"
        assert (await g.error(residency=(("eu-*",),))).status == 403  # where it computes is not known


@pytest.mark.parametrize("failure", [replies(500), resets])
async def test_what_makes_something_upstream_is_not_sent_twice(failure: Script) -> None:
    async with gateway([failure, replies(200, b"ok")]) as g:
        error = await g.error(repeatable=False)
        assert (error.status, len(g.servers[0].requests)) == (502, 1)
        await g.at_rest()


async def test_a_request_that_certainly_was_not_sent_is_sent_again_whatever_it_makes() -> None:
    async with gateway([replies(200)], url=f"http://127.0.0.1:{refusing_port()}") as g:
        await g.error(repeatable=False)
        assert (g.kinds, g.causes) == (["first", "retry", "retry"], ["refused"] * 3)


async def test_a_kept_connection_that_dies_costs_a_retry_and_no_wait() -> None:
    async with gateway([replies(200), resets, replies(200, b"ok")], retries={"backoff_ms": 60_000.0}) as g:
        await g.body()
        assert await g.body() == b"ok"
        assert (g.kinds, g.causes) == (["first", "retry"], ["stale", ""])
        assert g.state().failures == 0
        await g.at_rest()


@pytest.mark.parametrize("options", [{"repeatable": False}, {}])
async def test_with_no_retries_or_nothing_repeatable_a_request_is_sent_once(options: dict[str, Any]) -> None:
    retries = 2 if options else 0
    async with gateway([replies(200), resets, replies(200)], retries={"retries": retries}) as g:
        await g.body()
        error = await g.error(**options)
        assert (error.status, "may have been executed" in error.message) == (502, True)
        assert len(g.servers[0].requests) == 2
        await g.at_rest()


@pytest.mark.parametrize("status", [400, 404, 405, 413, 415, 422, 431, 451])
async def test_a_refusal_is_an_answer(status: int) -> None:
    async with gateway([replies(status, b"no")], [replies(200)]) as g:
        opened = await g.open()
        assert (opened.answer.status, await opened.read(10)) == (status, b"no")
        assert len(g.servers[0].requests) == 1
        assert not g.servers[1].requests
        opened.close(True)
        await g.at_rest()


@pytest.mark.parametrize("status", [408, 409])
async def test_a_passing_refusal_is_the_answer_once_retries_are_used_up(status: int) -> None:
    async with gateway([replies(status, b"no")], retries={"retries": 1}) as g:
        opened = await g.open()
        assert (opened.answer.status, await opened.read(10)) == (status, b"no")
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
            await opened.next()
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
        while (piece := await opened.next()) is not None:
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
        error = await g.error(deadline=g.clock() + 10)
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
