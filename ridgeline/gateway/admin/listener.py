"""AdminListener: the admin API on its own port, in the supervisor. Model requests of the console's Chat are
forwarded to the public port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from ridgeline.gateway.accounting.admin_endpoints import usage_reader, usage_routes
from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.chat import ChatForwarding, own_origin
from ridgeline.gateway.admin.console import console_routes
from ridgeline.gateway.admin.credentials import AdminKeys, key_file
from ridgeline.gateway.pipeline.endpoints import NAMES
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.store import Store
from ridgeline.options import OptionError
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from ridgeline.web.tls import certificate

LIMITS = ConnectionLimits(head_bytes=32 << 10, head_s=10.0, connections=256, per_address=None)


SETTLE_S = 1.0  # longest wait for a silent worker; each worker polls the store anyway


def policy_versions(status: dict[str, Any]) -> list[int]:
    """From the workers that answer."""
    return [worker["policy"]["policy_version"] for worker in status["workers"].values() if worker]


class AdminListener:
    def __init__(
        self,
        settings: GatewaySettings,
        status: Callable[[], Awaitable[Any]],
        metrics: Callable[[], Awaitable[str]],
        reload: Callable[[], Awaitable[Any]],
        public: tuple[str, int] | None = None,
    ) -> None:
        """public: address of the gateway's own listener, for the console's Chat."""
        self._settings = settings
        self._status, self._metrics, self._reload = status, metrics, reload
        self._store = Store(settings.store, settings.state_dir)
        self._keys = AdminKeys(key_file(settings.admin, settings.state_dir))
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._chat: ChatForwarding | None = None
        self._public = public
        self._reader = usage_reader(settings.store.url, settings.state_dir)
        self.url = ""

    @property
    def key_path(self) -> Path:
        return self._keys.path

    async def start(self) -> None:
        settings = self._settings
        listener = self._bound()
        app = admin_app(
            self._store,
            settings.admin,
            self._keys,
            endpoints=NAMES,
            guards=lambda: [one.name for one in settings.guards],
            status=self._status,
            metrics=self._metrics,
            reload=self._reload,
            settled=self._settled,
            extra_routes=[*usage_routes(self._reader), *self._console()],
        )
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.admin.ssl_certfile is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        shown = certificate(settings.admin.ssl_certfile, settings.admin.ssl_keyfile, "[admin] ")
        self._server = HttpServer(app, LIMITS, certificate=shown)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    def _console(self) -> list[BaseRoute]:
        if not self._settings.admin.console:
            return []
        if self._public is None:
            return [*console_routes()]
        (host, port), is_https = self._public, self._settings.gateway.ssl_certfile is not None
        self._chat = ChatForwarding(own_origin(host, port, is_https))
        shown = f"[{host}]" if ":" in host else host
        return [*console_routes(f"http{'s' if is_https else ''}://{shown}:{port}"), *self._chat.routes()]

    async def _settled(self) -> None:
        """Return when all workers have seen the last change: a key works as soon as it is shown."""
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                version = await self._store.version()
                while min(policy_versions(await self._status()), default=version) < version:
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._chat is not None:
            self._chat.close()
        await self._reader.close()
        await self._store.close()

    def _bound(self) -> socket.socket:
        host, port = self._settings.admin.host, self._settings.admin.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()  # from here on connections wait until the server takes them
        except OSError as error:
            raise OptionError(
                f"[admin] cannot listen on {host}:{port}: {error.strerror or error}; choose another with "
                "--admin-port or [admin] port"
            ) from error
        return listener
