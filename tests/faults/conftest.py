"""Servers that a fault test may break: each test gets its own, with the flags it needs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S


@pytest.fixture
def serve(smollm2_path: Path, tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    """serve("--max-running", "1") → a ready server of this test's own. It drains as patiently as tests wait:
    on a busy machine, a few hundred tokens take longer than the default."""
    started: list[LiveServer] = []

    def start(*flags: str) -> LiveServer:
        server = start_server(
            tmp_path / f"server-{len(started)}.log",
            "--kv-tokens",
            "8192",
            "--drain-s",
            f"{PATIENCE_S:g}",
            *flags,
        )
        started.append(server)
        await_ready(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(10)
            except Exception:
                server.process.kill()
                server.process.wait()


def engine_pid(server: LiveServer) -> int:
    """The engine is the front's only child process."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert len(children) == 1, f"expected one child of the front, found {children}"
    return int(children[0])


def chat_body(**changes: object) -> dict[str, object]:
    body: dict[str, object] = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Write a very long story about a lighthouse."}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    return body | changes


def events_of(lines: list[str]) -> list[dict]:
    """The JSON events of an SSE body; [DONE] is left out."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def is_clean_end(lines: list[str]) -> bool:
    return any(line == "data: [DONE]" for line in lines)


def metric(server: LiveServer, name: str) -> float:
    """The sum of a metric's samples as /metrics shows them."""
    text = httpx.get(f"{server.base_url}/metrics").text
    samples = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert samples, f"no metric {name} in\n{text}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)
