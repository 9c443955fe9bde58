"""The app over a scripted client: called in-process, or served by the real server on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from ridgeline.server.app import app_over
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.main import http_server
from ridgeline.server.records.state import StateStore
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.metrics import ServerMetrics
from tests.patience import PATIENCE_S
from tests.server.scripted_client import Script, ScriptedClient, ScriptedSupervisor, say

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Stage:
    """One app with its scripted engine."""

    script: Script = field(default_factory=lambda: say("hé!"))
    config: ServerConfig = field(default_factory=ServerConfig)
    state: StateStore | None = None
    template: str = "{{ messages }}"

    def __post_init__(self) -> None:
        self.client = ScriptedClient(self.script, self.template)
        self.supervisor = ScriptedSupervisor(self.client)
        self.metrics = ServerMetrics("m")
        model = Model(("m", "alias"), self.supervisor, self.metrics)
        self.served_models = ServedModels(self.config, [model], self.state)
        self.app = app_over(self.served_models)

    def metrics_text(self) -> str:
        return self.metrics.render(self.client.stats)[0].decode()

    def http(self, **options: Any) -> httpx.AsyncClient:
        """A client that calls the app in-process."""
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", **options)

    async def post(self, path: str = CHAT, body: Any = None, **options: Any) -> httpx.Response:
        async with self.http() as http:
            if body is not None:
                options["json"] = body
            return await http.post(path, **options)

    @contextlib.asynccontextmanager
    async def served(self, verify: ssl.SSLContext | bool = True) -> AsyncIterator[httpx.AsyncClient]:
        """The same app behind a real server and real sockets; over TLS if the config has a certificate."""
        scheme = "http" if self.config.ssl_certfile is None else "https"
        with contextlib.closing(socket.socket()) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()  # connections wait until the server takes them
            port = listener.getsockname()[1]
            server = http_server(self.app, self.config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                url = f"{scheme}://127.0.0.1:{port}"
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=verify) as http:
                    yield http
            finally:
                server.should_exit = server.force_exit = True
                await task


async def until(condition: Any) -> None:
    """Wait for something that happens soon; say so if it does not."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
