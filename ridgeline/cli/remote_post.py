"""Lines of a batch, asked of the server at --url. Standard library only; a thread for each under way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request

from ridgeline.cli.errors import RemoteError, check_trust
from ridgeline.server.batches.inner import Reply

TIMEOUT_S = 24 * 3600.0  # lines wait their turn behind everybody else's


class RemotePost:
    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
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
        request = urllib.request.Request(self._url + path, data=body, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                reply = Reply(answer.status, _headers(answer.headers), bytearray(answer.read()))
        except urllib.error.HTTPError as error:
            reply = Reply(error.code, _headers(error.headers), bytearray(error.read()))
            if error.code in (401, 403):
                raise RemoteError(f"{self._url} answered {error.code}: the key is not accepted") from error
        except (OSError, ValueError) as error:
            if not self._reached.is_set():
                check_trust(self._url, error)
                reason = getattr(error, "reason", error)
                message = f"cannot reach {self._url}: {reason}; is `ridgeline serve` running there?"
                raise RemoteError(message) from error
            return Reply(503)  # it was there, and may come back
        self._reached.set()
        return reply


def _headers(headers: object) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}  # type: ignore[attr-defined]
