"""Reloads, rolls and stops of real gateway processes: no client loses a request, and no tenant gains one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.stage import CHAT, asking
from tests.gateway.steady_load import steady_load
from tests.gateway.test_processes import Gateway, streamed
from tests.patience import PATIENCE_S

LONG = "mock_out30000_pace20"  # ten minutes: longer than a start on a busy machine


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path, drain_s=600.0)
    yield running
    running.end()


def workers(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = gateway.admin("GET", "/admin/upstreams").json()["data"]["workers"]
    return found


def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def worker_but(gateway: Gateway, other: int | None) -> int:
    """The process of worker 0, once it is not `other`. While it is replaced the status names none."""
    found: list[int] = []

    def is_there() -> bool:
        pid = (workers(gateway).get("0") or {}).get("pid")
        found[:] = [] if pid in (None, other) else [pid]
        return bool(found)

    until(is_there)
    return found[0]


def test_reloads_and_a_roll_under_load_fail_no_request(gateway: Gateway) -> None:
    secret = gateway.client().headers["authorization"].split()[1]
    port = urlsplit(gateway.url).port
    assert port is not None

    async def run() -> Any:
        async with steady_load(port, secret, per_s=20, streams=5, events=50) as seen:
            for _ in range(2):
                answer = await asyncio.to_thread(gateway.admin, "POST", "/admin/reload")
                assert answer.status_code == 200, answer.text
            before = await asyncio.to_thread(worker_but, gateway, None)
            os.kill(before, signal.SIGTERM)  # of a worker: another takes its place
            await asyncio.to_thread(worker_but, gateway, before)
            done = seen.requests
            async with asyncio.timeout(PATIENCE_S):
                while seen.requests < done + 10:
                    await asyncio.sleep(0.05)
        return seen

    seen = asyncio.run(run())
    assert seen.failures == []
    assert seen.closes >= 3  # each time the connections in use were told
    assert seen.streams >= 5


def test_a_new_connection_does_not_wait_for_a_worker_that_drains(gateway: Gateway) -> None:
    http = gateway.client()
    lines: list[str] = []
    streamed(http, LONG, lines)
    gateway.write_config(model="fast", target="mock/mock_out3")
    assert gateway.admin("POST", "/admin/reload").status_code == 200
    fresh = httpx.post(gateway.url + CHAT, json=asking("fast"), headers=http.headers, timeout=PATIENCE_S)
    assert fresh.json()["usage"]["completion_tokens"] == 3
    assert "end" not in lines, "answered while the old worker still streams"
    leaving = [name for name in workers(gateway) if name != "0"]
    assert len(leaving) == 1


def test_a_file_that_a_worker_rejects_is_refused_and_the_workers_stay(gateway: Gateway) -> None:
    before = worker_but(gateway, None)
    text = gateway.config.read_text()
    gateway.config.write_text(text + '\n[[guards]]\nname = "g"\npatterns = ["ids=(a+)+$"]\n')
    refused = gateway.admin("POST", "/admin/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_configuration")
    assert "ids" in refused.json()["error"]["message"]
    assert {name: one["pid"] for name, one in workers(gateway).items()} == {"0": before}


def test_limits_are_not_reset_by_a_reload(gateway: Gateway) -> None:
    made = gateway.admin(
        "POST", "/admin/keys", name="limited", limits={"requests_per_minute": 4, "concurrent": 1}
    ).json()
    headers = {"authorization": f"Bearer {made['secret']}"}
    url, began = gateway.url + CHAT, time.monotonic()

    def ask() -> httpx.Response:
        return httpx.post(url, json=asking("mock_out1"), headers=headers, timeout=PATIENCE_S)

    with httpx.Client(headers=headers, base_url=gateway.url, timeout=PATIENCE_S) as http:
        assert ask().status_code == 200
        with http.stream("POST", CHAT, json=asking(LONG, stream=True)):
            for _ in range(2):  # the counts pass on twice
                assert gateway.admin("POST", "/admin/reload").status_code == 200
            busy = ask()
            assert (busy.status_code, busy.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        until(lambda: ask().status_code == 200)  # as soon as the old worker has told of the end
        assert gateway.admin("POST", "/admin/reload").status_code == 200
        assert ask().status_code == 200
        spent = ask()
        if time.monotonic() - began < 55.0:  # else the minute is over, on a machine that is very busy
            assert (spent.status_code, spent.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_streams_that_outlive_the_drain_end_with_an_error_of_their_dialect(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, drain_s=0.2)
    try:
        http = gateway.client()
        said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        bodies = {CHAT: said, "/v1/messages": said, "/v1/responses": {"input": "x"}}
        texts: dict[str, str] = {}
        began = threading.Semaphore(0)

        def read(path: str) -> None:
            body = {"model": LONG, "stream": True, **bodies[path]}
            with http.stream("POST", path, json=body) as answer:
                texts[path] = ""
                for piece in answer.iter_text():
                    texts[path] += piece
                    began.release()

        threads = [threading.Thread(target=read, args=(path,)) for path in bodies]
        for thread in threads:
            thread.start()
        until(lambda: len(texts) == 3)
        for _ in bodies:
            assert began.acquire(timeout=PATIENCE_S)
        whole: list[httpx.Response] = []
        late = asking("mock_late60000")
        waiting = threading.Thread(target=lambda: whole.append(http.post(CHAT, json=late)))
        waiting.start()
        until(lambda: (workers(gateway).get("0") or {}).get("under_way") == 4)
        gateway.process.send_signal(signal.SIGTERM)
        for thread in [*threads, waiting]:
            thread.join(PATIENCE_S)
        assert gateway.process.wait(PATIENCE_S) == 0
        last = {path: text.strip().split("\n\n")[-1] for path, text in texts.items()}
        assert json.loads(last[CHAT].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert last["/v1/messages"].startswith("event: error\n")
        assert '"code":"shutting_down"' in last["/v1/responses"]
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "shutting_down")
    finally:
        gateway.end()


def test_a_client_that_comes_while_the_gateway_stops_is_refused_at_once(gateway: Gateway) -> None:
    http = gateway.client()
    lines: list[str] = []
    streamed(http, LONG, lines)
    gateway.process.send_signal(signal.SIGTERM)
    parts = urlsplit(gateway.url)

    def refused() -> bool:
        try:
            socket.create_connection((parts.hostname, parts.port), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    until(refused)
    count = len(lines)
    until(lambda: len(lines) > count)  # the stream goes on
