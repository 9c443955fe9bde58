"""Lines of a batch, asked of the server at --url. A thread for each request under way."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from ridgeline.cli.errors import RemoteError, check_trust
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.server.batches.inner import Reply

TIMEOUT_S = 24 * 3600.0  # lines wait their turn behind everybody else's


class RemotePost:
    def __init__(self, url: str, api_key: str) -> None:
        self._client = BlockingClient(url, timeout_s=TIMEOUT_S, api_key=api_key)
        self._reached = threading.Event()

    async def __call__(self, path: str, body: bytes, request_id: str) -> Reply:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reply] = loop.create_future()

        def settle(reply: Reply | None, error: Exception | None) -> None:
            if answered.done():
                return  # cancelled meanwhile
            if reply is not None:
                answered.set_result(reply)
            else:
                answered.set_exception(error or RemoteError("no answer"))

        def work() -> None:
            reply = failure = None
            try:
                reply = self._post(path, body)
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(settle, reply, failure)

        # A daemon: who stops the command does not want to wait for answers that nobody will read.
        threading.Thread(target=work, daemon=True).start()
        return await answered

    def _post(self, path: str, body: bytes) -> Reply:
        url = self._client.url
        try:
            answer = self._client.ask("POST", path, body)
        except (Unreachable, BrokenOff) as error:
            if not self._reached.is_set():
                check_trust(url, error)
                message = f"cannot reach {url}: {error}; is `ridgeline serve` running there?"
                raise RemoteError(message) from error
            return Reply(503)  # it was there, and may come back
        if answer.status in (401, 403):
            raise RemoteError(f"{url} answered {answer.status}: the key is not accepted")
        self._reached.set()
        return Reply(answer.status, answer.headers, bytearray(answer.body))
