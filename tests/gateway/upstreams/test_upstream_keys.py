"""Keys of upstreams: limited, refused, dead, taking turns; a client's own never goes on."""

from __future__ import annotations

import time

import pytest

from ridgeline.gateway.errors import Limited
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from tests.gateway.upstreams.several import gateway
from tests.patience import PATIENCE_S
from tests.proxy.scripted import (
    Request,
    Script,
    Wire,
    replies,
)


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
        again = await g.error()  # known: no upstream is called
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
            [Target("a", "other")],
            lambda target: outgoing,
            tenant="t",
            deadline=time.monotonic() + PATIENCE_S,
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
