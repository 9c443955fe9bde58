"""A router's app on a real listener in the test's loop, and router processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from ridgeline.fleet.router.app import RouterApp
from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.process import config_line, router_command
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from tests.fleet.router.conftest import until
from tests.patience import PATIENCE_S


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@contextlib.asynccontextmanager
async def served(app: RouterApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app."""
    listener = listening()
    listener.setblocking(False)
    server = HttpServer(app, ConnectionLimits(64 << 10, 10.0, 100, None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            await until(lambda: server.started, "the listener")
            yield client
    finally:
        server.should_exit = True
        await serving


@contextlib.contextmanager
def router_process(control: Path, config: RouterConfig) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router process and its URL. It is killed at the end if it still runs."""
    with listening() as listener:
        command = router_command(listener.fileno(), control)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    assert process.stdin is not None
    try:
        process.stdin.write(config_line(config))
        process.stdin.flush()
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdin.close()
