"""PeerMetrics: GET /metrics of several router processes that share a port shows all of them.

Each process answers with its own figures on a socket that this user alone can open. The process that a scrape
reaches asks the others and merges the pages: gauges by their rule, while counters and histograms have the
label `router` and stay apart. A process that restarts, or does not answer in time, changes its own series
alone; `routers` says how many are in the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from ridgeline.fleet.router.observe.metrics import FAMILIES, PREFIX
from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url
from ridgeline.telemetry.exposition import CONTENT_TYPE, Merged
from ridgeline.web.private_socket import listen_private

TIMEOUTS = Timeouts(connect_s=0.5, first_byte_s=2.0, idle_s=2.0)
MAX_PAGE = 16 << 20

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PeerMetrics:
    """folder: with the sockets of all routers. own: the page of this process."""

    def __init__(self, folder: Path, name: str, client: HttpClient, own: Callable[[], str]) -> None:
        self._path, self._client, self._own = folder / f"{name}.sock", client, own
        self._inode = 0

    def bind(self) -> socket.socket:
        made = listen_private(self._path)
        self._inode = self._path.stat().st_ino
        return made

    async def text(self) -> str:
        paths = sorted(path for path in self._path.parent.glob("*.sock") if path != self._path)
        pages = await asyncio.gather(*map(self._page, paths))
        merged = Merged({f"{PREFIX}{name}": family for name, family in FAMILIES.items()})
        merged.update(self._path.name, self._own())
        for path, page in zip(paths, pages, strict=True):
            if page:
                merged.update(path.name, page)
        return merged.text()

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: Send) -> None:
        """The page of this process alone, for the others."""
        body = self._own().encode()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # not that of its successor
                self._path.unlink()

    async def _page(self, path: Path) -> str:
        """Empty: it does not answer."""
        origin = read_url(f"unix:{path}", where="a router's socket")
        try:
            answer = await self._client.ask(origin, "GET", "/metrics", [], timeouts=TIMEOUTS)
            return (await answer.read(MAX_PAGE)).decode()
        except ProxyError:
            return ""
