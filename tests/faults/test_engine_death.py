"""The engine process dies, hangs or loses its front: every client is told, and the service comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.conftest import await_ready, start_server
from tests.faults.conftest import chat_body, engine_pid, events_of, is_clean_end, metric
from tests.patience import PATIENCE_S


def test_a_killed_engine_ends_streams_with_an_error_and_is_started_again(serve):
    server = serve()
    killed = engine_pid(server)
    lines: list[str] = []
    seen_red = False
    with httpx.stream(
        "POST", f"{server.base_url}/v1/chat/completions", json=chat_body(), timeout=PATIENCE_S
    ) as stream:
        for line in _until_the_connection_breaks(stream):
            lines.append(line)
            if not seen_red and sum('"content":"' in one for one in lines) == 3:
                os.kill(killed, signal.SIGKILL)
                seen_red = _turns_red(server)
    assert seen_red, "/ready must turn red while the engine is gone"
    assert "error" in events_of(lines)[-1]
    assert events_of(lines)[-1]["error"]["message"]
    assert not is_clean_end(lines)
    await_ready(server)
    assert engine_pid(server) != killed
    again = httpx.post(
        f"{server.base_url}/v1/chat/completions",
        json=chat_body(stream=False, max_tokens=4),
        timeout=PATIENCE_S,
    )
    assert again.status_code == 200
    assert again.json()["usage"]["completion_tokens"] == 4
    assert metric(server, "ridgeline:engine_restarts_total") == 1


def _until_the_connection_breaks(stream: httpx.Response) -> Iterator[str]:
    """The lines of a stream; a body cut off before its end is what a client must see of a failure."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        yield from stream.iter_lines()


def _turns_red(server) -> bool:
    """Before another engine is there: one takes seconds to start, and the polls are far closer together."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if httpx.get(f"{server.base_url}/ready").status_code == 503:
            return True
    return False


def test_a_waiting_answer_of_a_killed_engine_is_an_error_not_a_short_answer(serve):
    server = serve()
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
        threading.Timer(1.0, lambda: os.kill(engine_pid(server), signal.SIGKILL)).start()
        answer = client.post("/v1/chat/completions", json=chat_body(stream=False, max_tokens=2000))
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]
    assert answer.headers["x-ridgeline-engine-died"] == "1"  # a router counts it as a replica's death


def test_a_stopped_engine_is_not_ready_until_it_goes_on(serve):
    """Alive is not enough: readiness is progress."""
    server = serve("--stall-s", "2")
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while httpx.get(f"{server.base_url}/ready").status_code == 200:
            assert time.monotonic() < deadline, "/ready stayed green though the engine's loop stands still"
            time.sleep(0.1)
        assert "progress" in httpx.get(f"{server.base_url}/ready").text
        assert httpx.get(f"{server.base_url}/health").status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    await_ready(server)
    assert engine_pid(server) == pid


def test_an_engine_without_its_front_leaves(serve):
    server = serve()
    pid = engine_pid(server)
    server.process.kill()
    server.process.wait()
    _wait_for_its_end(pid)


def test_an_engine_whose_front_dies_while_it_starts_leaves_too(smollm2_path, tmp_path):
    server = start_server(tmp_path / "server.log", "--kv-tokens", "8192")
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    deadline = time.monotonic() + PATIENCE_S
    while not children.read_text().split():
        assert time.monotonic() < deadline, "the front started no engine"
        time.sleep(0.01)
    pid = engine_pid(server)
    server.process.kill()
    server.process.wait()
    _wait_for_its_end(pid)


def _wait_for_its_end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the engine outlived its front")
        time.sleep(0.1)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
