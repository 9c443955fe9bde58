"""Health by progress and by probe, what a request used, and what comes of configuration."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.errors import UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams import usage_reports
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.credentials import read_credentials
from ridgeline.gateway.upstreams.upstreams import Upstreams
from ridgeline.options import OptionError, options_of
from tests.gateway.upstreams.several import Gateway, gateway
from tests.patience import PATIENCE_S
from tests.proxy.scripted import hangs, replies, resets, scripted, sends

ONE_BYTE = sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")


def look(g: Gateway) -> None:
    """What the health task does twice a second."""
    g.upstreams._health._look()


# ── progress ──


@pytest.mark.parametrize("begun", [True, False])
async def test_streams_that_all_stand_still_open_the_breaker(begun: bool) -> None:
    async with gateway([ONE_BYTE if begun else hangs], stall_s=60.0, first_byte_timeout_s=300.0) as g:
        task = asyncio.create_task(g.open(stream=True, deadline=time.monotonic() + 900))
        await g.servers[0].until(lambda: bool(g.servers[0].requests))
        if begun:
            await task
        look(g)
        assert g.state().breaker == "closed"
        g.clock.ahead_s += 61
        look(g)
        assert g.state().breaker == "open"
        g.clock.ahead_s += 6
        look(g)
        assert g.state().breaker == "half_open"  # and the next trial request gets its full time
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_byte_on_any_request_is_progress() -> None:
    async with gateway([ONE_BYTE, replies(200)], stall_s=60.0) as g:
        opened = await g.open(stream=True, deadline=time.monotonic() + 900)
        g.clock.ahead_s += 50
        await g.body(deadline=time.monotonic() + 900)
        g.upstreams._upstreams["a"].heard_at += g.clock.ahead_s  # sockets go by the real clock
        g.clock.ahead_s += 50
        look(g)
        assert g.state().breaker == "closed"
        opened.abort()


async def test_an_answer_that_is_not_streamed_may_take_its_time() -> None:
    async with gateway([hangs], stall_s=60.0) as g:
        task = asyncio.create_task(g.open(deadline=time.monotonic() + 900))
        await g.servers[0].until(lambda: bool(g.servers[0].requests))
        g.clock.ahead_s += 100
        look(g)
        assert g.state().breaker == "closed"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_slow_readers_stream_is_no_sign_of_a_stall() -> None:
    async with gateway([ONE_BYTE], stall_s=60.0) as g:
        opened = await g.open(stream=True, deadline=time.monotonic() + 900)
        opened.answer.pause()
        g.clock.ahead_s += 100
        look(g)
        assert g.state().breaker == "closed"
        opened.abort()


# ── probes ──


async def test_two_failed_probes_open_the_breaker_and_a_good_one_lets_a_request_try() -> None:
    async with gateway(
        [replies(503), replies(503), replies(200, b'{"status":"ready"}')], kind="ridgeline"
    ) as g:
        assert await g.upstreams.probe() == {"a": False}
        assert (g.state().breaker, g.state().probe) == ("closed", "failed")
        await g.upstreams.probe()
        assert g.state().breaker == "open"
        await g.upstreams.probe()
        assert (g.state().breaker, g.state().probe) == ("half_open", "ok")
        await g.body()
        assert g.state().breaker == "closed"
        assert [request.path for request in g.servers[0].requests[:3]] == ["/ready"] * 3


async def test_a_probe_that_hangs_has_failed() -> None:
    async with gateway([hangs], probe_timeout_s=0.5) as g:
        assert await g.upstreams.probe() == {"a": False}
        await g.servers[0].until(lambda: bool(g.servers[0].requests))
        assert g.servers[0].requests[0].path == "/v1/models"
        await g.at_rest()


async def test_a_server_that_refuses_a_probe_is_up() -> None:
    async with gateway([replies(401)]) as g:
        assert await g.upstreams.probe() == {"a": True}
        assert g.state().credentials["dead"] == 0


async def test_upstreams_are_probed_by_themselves_once_started() -> None:
    async with gateway([replies(503)], probe_s=0.01, probe_timeout_s=0.5) as g:
        g.upstreams.start()
        await g.servers[0].until(lambda: g.state().breaker != "closed")


# ── what a request used ──


def report(status: str, **usage: Any) -> bytes:
    return json.dumps({"request_id": "r", "status": status, "usage": usage}).encode()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes is waited for, on a busy machine too."""
    monkeypatch.setattr(usage_reports, "WAIT_S", PATIENCE_S)
    monkeypatch.setattr(usage_reports, "UNKNOWN_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
async def test_usage_is_asked_for_until_the_request_has_ended() -> None:
    done = report(
        "aborted",
        prompt_tokens=10,
        completion_tokens=4,
        total_tokens=14,
        prompt_tokens_details={"cached_tokens": 8},
        completion_tokens_details={"reasoning_tokens": 1},
    )
    async with gateway([replies(200, report("running")), replies(200, done)], kind="ridgeline") as g:
        assert await g.upstreams.usage_of("a", "req_1") == Usage(10, 8, 0, 4, 1, "reported")
        assert [request.path for request in g.servers[0].requests] == ["/v1/usage/req_1"] * 2


@pytest.mark.usefixtures("patient")
async def test_a_request_that_arrives_after_the_question_for_it_is_found() -> None:
    script = [replies(404), replies(404), replies(200, report("aborted", prompt_tokens=3))]
    async with gateway(script, kind="ridgeline") as g:
        assert await g.upstreams.usage_of("a", "req_1") == Usage(3, source="reported")


@pytest.mark.parametrize(
    ("since", "expected"),
    [("1000.5", Usage(source="reported")), ("1999.5", None), ("2001", None), ("soon", None), ("nan", None)],
)
async def test_an_upstream_that_would_know_a_request_and_does_not_has_computed_nothing(
    since: str, expected: Usage | None
) -> None:
    async with gateway([replies(404, b"{}", f"x-ridgeline-usage-since: {since}")], kind="ridgeline") as g:
        assert await g.upstreams.usage_of("a", "req_1", 2_000_000) == expected


async def test_usage_that_nobody_knows_is_none() -> None:
    async with gateway([replies(404)], kind="ridgeline") as g:
        assert await g.upstreams.usage_of("a", "req_1") is None
        assert await g.upstreams.usage_of("elsewhere", "req_1") is None
        assert await g.upstreams.usage_of("a", "../../secret") is None
        assert {request.path for request in g.servers[0].requests} == {"/v1/usage/req_1"}
    async with gateway([replies(200)], kind="openai") as g:
        assert await g.upstreams.usage_of("a", "req_1") is None
        assert not g.servers[0].requests


async def test_usage_that_cannot_be_told_yet_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reports, "WAIT_S", 0.1)
    async with gateway([replies(200, report("running"))], kind="ridgeline") as g:
        with pytest.raises(UpstreamTimeout):
            await g.upstreams.usage_of("a", "req_1")
    for script in (replies(500), replies(200, b"[]"), resets):
        async with gateway([script], kind="ridgeline") as g:
            with pytest.raises(UpstreamFailed):
                await g.upstreams.usage_of("a", "req_1")


# ── configuration ──


def test_keys_come_from_variables_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# spare ones\n\nthree\n four \n")
    config = UpstreamConfig(name="a", url="http://h", key_env=("ONE", "TWO"), key_file=file)
    keys = read_credentials(config, {"ONE": "one", "TWO": "two\n"}).keys
    assert [(key.name, key.lines) for key in keys] == [
        ("ONE", b"authorization: Bearer one\r\n"),
        ("TWO", b"authorization: Bearer two\r\n"),
        ("keys:3", b"authorization: Bearer three\r\n"),
        ("keys:4", b"authorization: Bearer four\r\n"),
    ]


@pytest.mark.parametrize("secret", ["se\r\ncret: 1", "se cret", "sé-cret", "se\0cret"])
def test_a_key_that_is_none_is_refused_without_being_shown(secret: str) -> None:
    config = UpstreamConfig(name="a", url="http://h", key_env=("ONE",))
    with pytest.raises(OptionError) as failure:
        read_credentials(config, {"ONE": secret})
    assert "ONE" in str(failure.value)
    assert "cret" not in str(failure.value)


def test_missing_keys_are_said_at_start(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="variable ONE is not set"):
        read_credentials(UpstreamConfig(name="a", url="http://h", key_env=("ONE",)), {})
    (tmp_path / "empty").write_text("# none\n")
    for name, words in (("absent", "cannot be read"), ("empty", "holds no key")):
        with pytest.raises(OptionError, match=words):
            read_credentials(UpstreamConfig(name="a", url="http://h", key_file=tmp_path / name), {})


async def test_a_snapshot_holds_no_key_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K1", "topsecret")
    async with scripted(replies(401)) as server:
        upstreams = Upstreams([UpstreamConfig(name="a", url=server.url, key_env=("K1",))])
        shown = repr(upstreams.snapshot())
        assert "topsecret" not in shown
        assert "127.0.0.1" not in shown
        await upstreams.stop()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent": 0},
        {"max_waiting": 0},
        {"connect_timeout_s": 0.0},
        {"idle_timeout_s": -1.0},
        {"stall_s": -1.0},
        {"probe_path": "ready"},
    ],
)
def test_settings_of_an_upstream_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        UpstreamConfig(name="a", url="http://h", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": 11},
        {"budget_ratio": 1.5},
        {"breaker_ratio": 0.0},
        {"breaker_failures": 0},
        {"breaker_open_s": 0.0},
        {"backoff_ms": -1.0},
    ],
)
def test_settings_of_retries_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        RetryConfig(**wrong)


def test_every_setting_has_its_line_of_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway-reliability.md").read_text()
    for config in (UpstreamConfig, RetryConfig):
        for option in options_of(config):
            shown = str(option.default).lower() if option.base is bool else option.default
            default = "" if option.default in (None, (), "") else f"`{shown}`"
            assert f"| `{option.name}` | {default} | {option.doc} |" in page, option.name
