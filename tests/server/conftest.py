"""The scripted stage as a fixture."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import STOP_TIMEOUT_S, await_ready, free_port, start_server
from tests.server.stage import Stage


@pytest.fixture
async def stage() -> Stage:
    return Stage()


@dataclass(frozen=True, slots=True)
class VectorServer:
    """A real server with all-minilm-l6-v2 and a tiny cross-encoder, which `reference` computes."""

    base_url: str
    cross_encoder: str
    reference: Any
    grpc_port: int


@pytest.fixture(scope="session")
def vector_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    from ridgeline.models.files.pull import ensure
    from tests.server.tiny_cross_encoder import save_cross_encoder

    ensure("all-minilm-l6-v2")
    folder: Path = tmp_path_factory.mktemp("cross") / "tiny-cross"
    reference = save_cross_encoder(folder)
    log = tmp_path_factory.mktemp("vector_server") / "server.log"
    server = start_server(log, models=("all-minilm-l6-v2", str(folder)), grpc_port=free_port())
    try:
        await_ready(server)
        yield VectorServer(server.base_url, "tiny-cross", reference, server.grpc_port)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, f"not a clean stop:\n{log.read_text()}"
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
