"""SIGTERM: nothing new, what runs finishes up to a deadline, exit 0."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx

from tests.faults.conftest import chat_body, engine_pid, events_of, is_clean_end
from tests.patience import PATIENCE_S


def stream_in_background(server, body) -> tuple[threading.Thread, list[str], threading.Event]:
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        try:
            with httpx.stream(
                "POST", f"{server.base_url}/v1/chat/completions", json=body, timeout=PATIENCE_S
            ) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    if '"content":"' in line:
                        begun.set()
        except httpx.TransportError as error:  # a failed stream's body ends early, after its error event
            lines.append(f"transport error: {error}")

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(PATIENCE_S)
    return thread, lines, begun


def test_sigterm_finishes_running_streams_and_takes_nothing_new(serve):
    server = serve()
    thread, lines, _ = stream_in_background(server, chat_body(max_tokens=60))
    server.process.send_signal(signal.SIGTERM)
    refused = _wait_for_refusal(server)
    thread.join(PATIENCE_S)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert is_clean_end(lines)
    assert events_of(lines)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE_S) == 0


def test_sigterm_to_the_whole_process_group_finishes_running_streams(serve):
    server = serve()
    thread, lines, _ = stream_in_background(server, chat_body(max_tokens=60))
    for pid in (engine_pid(server), server.pid):
        os.kill(pid, signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert is_clean_end(lines)
    assert server.process.wait(PATIENCE_S) == 0


def _wait_for_refusal(server) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = httpx.post(
            f"{server.base_url}/v1/chat/completions",
            json=chat_body(stream=False, max_tokens=1),
            timeout=PATIENCE_S,
        )
        if answer.status_code != 200:
            return answer
    raise AssertionError("new requests were still taken while draining")


def test_a_stream_longer_than_the_deadline_is_told(serve):
    server = serve("--drain-s", "1")
    thread, lines, _ = stream_in_background(server, chat_body(max_tokens=4000))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    thread.join(PATIENCE_S)
    assert "error" in events_of(lines)[-1]
    assert not is_clean_end(lines)


def test_an_idle_server_does_not_wait_for_the_drain_deadline(serve):
    server = serve("--drain-s", "3600")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
