"""Sends the lines of a batch to the server at --url, with one thread per running request."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from ridgeline.cli.errors import RemoteError, check_trust
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import BrokenOff, Unreachable
from ridgeline.server.batches.inner import Reply

TIMEOUT_S = 24 * 3600.0  # lines are served after all other requests


class RemotePost:
    def __init__(self, url: str, api_key: str) -> None:
        self._client = BlockingClient(url, timeout_s=TIMEOUT_S, api_key=api_key)
        self._reached = threading.Event()

    async def __call__(self, path: str, body: bytes, request_id: str) -> Reply:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reply] = loop.create_future()

        def settle(reply: Reply | None, error: Exception | None) -> None:
            if answered.done():
                return  # cancelled in the meantime
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(settle, reply, failure)

        # A daemon: stopping the command must not wait for answers.
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
            return Reply(503)  # it answered before, and may come back
        if answer.status in (401, 403):
            raise RemoteError(f"{url} answered {answer.status}: it rejected the key")
        self._reached.set()
        return Reply(answer.status, answer.headers, bytearray(answer.body))
