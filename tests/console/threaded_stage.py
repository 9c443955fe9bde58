"""Servers in a thread of their own, for tests that drive a browser."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from starlette.types import ASGIApp

from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from tests.patience import PATIENCE_S
from tests.server.stage import Stage

T = TypeVar("T")


@contextlib.contextmanager
def threaded(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `make` yields, which lives in the loop of another thread."""
    ready: Future[T] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with make() as found:
            ready.set_result(found)
            await stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield ready.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)


def serving(make: Callable[[], Stage]) -> contextlib.AbstractContextManager[tuple[str, Stage]]:
    """A server over a scripted engine: its URL and the Stage. make: builds it, inside of its loop."""

    @contextlib.asynccontextmanager
    async def stage() -> AsyncIterator[tuple[str, Stage]]:
        made = make()
        async with made.served() as http:
            yield str(http.base_url).rstrip("/"), made

    return threaded(stage)


@contextlib.asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The URL of an app behind the server that gateway and fleet use."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        limits = ConnectionLimits(head_bytes=32 << 10, head_s=PATIENCE_S, connections=64, per_address=None)
        server: Any = HttpServer(app, limits)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
