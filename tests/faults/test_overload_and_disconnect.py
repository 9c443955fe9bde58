"""Full queues are said so; clients that leave free what they held; slow readers harm no other request."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest

from tests.faults.conftest import chat_body, metric
from tests.patience import PATIENCE_S

RUNNING = "ridgeline:num_requests_running"
WAITING = "ridgeline:num_requests_waiting"
KV_USE = "ridgeline:kv_cache_usage_perc"


def wait_until(condition, what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def open_stream(server, **changes) -> socket.socket:
    """A raw connection with a streaming request on it, which a test can read or not, and close at will."""
    import json

    host, _, port = server.base_url.removeprefix("http://").partition(":")
    body = json.dumps(chat_body(**changes)).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    return connection


def test_a_full_queue_is_answered_429_with_retry_after(serve):
    server = serve("--max-running", "1", "--max-waiting", "2")
    held = [open_stream(server, max_tokens=3000)]
    wait_until(lambda: metric(server, RUNNING) == 1, "the first request never ran")
    held += [open_stream(server, max_tokens=3000) for _ in range(2)]
    wait_until(lambda: metric(server, WAITING) == 2, "the queue never filled")
    refused = httpx.post(
        f"{server.base_url}/v1/chat/completions",
        json=chat_body(stream=False, max_tokens=1),
        timeout=PATIENCE_S,
    )
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"]
    for connection in held:
        connection.close()
    wait_until(lambda: metric(server, RUNNING) + metric(server, WAITING) == 0, "abandoned requests stayed")
    accepted = httpx.post(
        f"{server.base_url}/v1/chat/completions",
        json=chat_body(stream=False, max_tokens=1),
        timeout=PATIENCE_S,
    )
    assert accepted.status_code == 200


@pytest.mark.parametrize("moment", ["queued", "in prefill", "mid-stream"])
def test_a_disconnected_client_frees_its_blocks(serve, moment):
    flags = {
        "queued": ("--max-running", "1"),
        "in prefill": ("--prefill-chunk", "8"),
        "mid-stream": (),
    }[moment]
    server = serve("--no-prefix-cache", *flags)
    long_prompt = [{"role": "user", "content": "lighthouse keeper " * 1200}]
    if moment == "queued":
        running = open_stream(server, max_tokens=3000)
        wait_until(lambda: metric(server, RUNNING) == 1, "the first request never ran")
        leaving = open_stream(server, max_tokens=3000)
        wait_until(lambda: metric(server, WAITING) == 1, "the second request never queued")
        leaving.close()
        wait_until(lambda: metric(server, WAITING) == 0, "a queued request outlived its client")
        running.close()
    elif moment == "in prefill":
        leaving = open_stream(server, messages=long_prompt)
        wait_until(lambda: metric(server, KV_USE) > 0, "the prompt never began")
        leaving.close()
    else:
        leaving = open_stream(server, max_tokens=3000)
        assert b"content" in _read_until_content(leaving)
        leaving.close()
    wait_until(lambda: metric(server, RUNNING) == 0 and metric(server, KV_USE) == 0, "blocks stayed held")


def _read_until_content(connection: socket.socket) -> bytes:
    received = b""
    while b'"content":"' not in received:
        piece = connection.recv(4096)
        assert piece, f"the stream ended early: {received!r}"
        received += piece
    return received


def test_a_non_streaming_client_that_leaves_is_aborted_too(serve):
    server = serve()
    leaving = open_stream(server, stream=False, max_tokens=3000)
    wait_until(lambda: metric(server, RUNNING) == 1, "the request never ran")
    leaving.close()
    wait_until(lambda: metric(server, RUNNING) == 0, "the request outlived its client")


def test_a_reader_that_stops_reading_is_cut_and_slows_nobody(serve):
    """Its tiny receive buffer fills, then the server's bounded buffer, then it is cut; others finish."""
    server = serve("--stream-stall-s", "1", "--stream-buffer-chunks", "8")
    stuck = [open_stream_with_small_buffer(server) for _ in range(2)]
    results: list[int] = []

    def healthy() -> None:
        answer = httpx.post(
            f"{server.base_url}/v1/chat/completions",
            json=chat_body(stream=False, max_tokens=40),
            timeout=PATIENCE_S,
        )
        results.append(answer.json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=healthy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [40, 40, 40]
    wait_until(
        lambda: metric(server, "ridgeline:slow_readers_cut_total") == 2, "the stuck readers were never cut"
    )
    wait_until(lambda: metric(server, RUNNING) == 0, "cut streams went on computing")
    for connection in stuck:
        connection.close()


def open_stream_with_small_buffer(server) -> socket.socket:
    """Many samples with many logprobs fill the buffers of the kernel soon."""
    import json

    host, _, port = server.base_url.removeprefix("http://").partition(":")
    body = json.dumps(chat_body(max_tokens=3000, logprobs=True, top_logprobs=20, n=8)).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    return connection
