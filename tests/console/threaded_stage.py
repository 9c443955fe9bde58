"""A server over a scripted engine in a thread of its own, for tests that drive a browser."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from tests.patience import PATIENCE_S
from tests.server.stage import Stage


@contextlib.contextmanager
def serving(make: Any) -> Iterator[tuple[str, Stage]]:
    """make: builds the Stage, inside of the server's loop. Yields its URL and the Stage."""
    ready: Future[tuple[str, Stage]] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        stage = make()
        async with stage.served() as http:
            ready.set_result((str(http.base_url).rstrip("/"), stage))
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
