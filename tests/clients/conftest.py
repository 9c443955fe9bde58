"""One server for all clients: chat, embeddings and a model that thinks side by side, with a key."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import STOP_TIMEOUT_S, LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S
from tests.tiny_thinker import save_thinker

# Clients that report home, or look there for prices, would wait for a network that tests do without.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", ANTHROPIC_LOG="")

KEY = "sk-of-the-tests"
MODEL = "smollm2-135m"
EMBEDDER = "all-minilm-l6-v2"
THINKER = "thinker"  # tiny and random, but it thinks before it answers
TIMEOUT_S = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Target:
    """Where the clients are pointed."""

    root: str
    server: LiveServer

    @property
    def v1(self) -> str:
        return f"{self.root}/v1"

    def post(self, path: str, body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.root}{path}", json=body, headers=headers, timeout=TIMEOUT_S)


@pytest.fixture(scope="session")
def target(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server of this folder; it must drain and exit 0 at the end."""
    directory = tmp_path_factory.mktemp("clients")
    flags = ["--api-keys", KEY, "--deterministic", "--state-dir", str(directory / "state")]
    thinker = directory / THINKER
    thinker.mkdir()
    save_thinker(thinker)
    server = start_server(directory / "server.log", *flags, models=(MODEL, EMBEDDER, str(thinker)))
    try:
        await_ready(server)
        yield Target(server.base_url, server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, f"not a clean stop:\n{server.log.read_text()}"
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a client runs with each of its module's CLIENTS, or the one its mark names."""
    if "client_name" in metafunc.fixturenames:
        marks = metafunc.definition.iter_markers("client_case")
        only = next((mark.args[2] for mark in marks if mark.args[2]), None)
        metafunc.parametrize("client_name", [only] if only else metafunc.module.CLIENTS)


@pytest.fixture
async def client(client_name: str, target: Target, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """What the module's `client_of` makes of that name."""
    made = request.module.client_of(client_name, target)
    yield made
    if hasattr(made, "close"):
        closing = made.close()
        if inspect.isawaitable(closing):
            await closing
