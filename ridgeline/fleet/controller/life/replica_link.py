"""ReplicaLink: the controller's requests to a replica: one real generation before it is ready, and its feed.

Every request has the key that the controller made for its replicas. A failure is returned, never raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin, read_url
from ridgeline.proxy.request_head import header_lines
from ridgeline.replica.messages import FEED_PATH, Load, Started, decode_line

MAX_BODY = 1 << 20
RETRY_S = 0.25
NO_FEED_RETRY_S = 5.0
_ASK = Timeouts(connect_s=2.0, first_byte_s=10.0, idle_s=10.0)
_GENERATE = Timeouts(connect_s=2.0, first_byte_s=120.0, idle_s=30.0)
# A replica reports its load several times a second; the controller judges silence itself.
_FEED = Timeouts(connect_s=2.0, first_byte_s=10.0, idle_s=float("inf"))
_WANTED = (b'{"type":"load"', b'{"type":"started"')  # prefix events are for routers


class _Model(msgspec.Struct):
    task: str | None = None


class _Models(msgspec.Struct):
    """The answer to GET /v1/models."""

    data: list[_Model]


class ReplicaLink:
    def __init__(self, client: HttpClient, key: str) -> None:
        self._client = client
        self._fixed = header_lines(
            [(b"authorization", b"Bearer " + key.encode()), (b"content-type", b"application/json")]
        )

    async def is_up(self, url: str) -> bool:
        """Whether its engine has started."""
        status, _ = await self._ask(read_url(url), "GET", "/ready", b"", _ASK)
        return status == 200

    async def generates(self, url: str, model: str, tokens: int = 1) -> str:
        """Compute some tokens, or one embedding. Returns the reason of a failure; empty if it works."""
        origin = read_url(url)
        status, body = await self._ask(origin, "GET", "/v1/models", b"", _ASK)
        if status != 200:
            return f"GET /v1/models: {_why(status, body)}"
        try:
            cards = msgspec.json.decode(body, type=_Models).data
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"GET /v1/models: its answer cannot be read: {error}"
        if any(card.task == "embed" for card in cards):
            path, asked = "/v1/embeddings", {"model": model, "input": "1"}
        else:
            path = "/v1/completions"
            asked = {"model": model, "prompt": "1", "max_tokens": tokens, "temperature": 0}  # type: ignore[dict-item]
        status, body = await self._ask(origin, "POST", path, msgspec.json.encode(asked), _GENERATE)
        return "" if status == 200 else f"POST {path}: {_why(status, body)}"

    async def follow(self, url: str, hear: Callable[[Started | Load], None]) -> None:
        """Read every Started and Load line of the feed, until cancelled."""
        origin = read_url(url)
        while True:
            try:
                found = await self._read_feed(origin, hear)
            except (ProxyError, msgspec.MsgspecError):
                found = True
            await asyncio.sleep(RETRY_S if found else NO_FEED_RETRY_S)

    async def _read_feed(self, origin: Origin, hear: Callable[[Started | Load], None]) -> bool:
        """Returns False if the replica has no feed."""
        answer = await self._client.ask(
            origin, "GET", FEED_PATH, [], timeouts=_FEED, fixed=self._fixed, stream=True
        )
        rest = b""
        try:
            if answer.status != 200:
                return answer.status not in (404, 405)
            while (piece := await answer.next()) is not None:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(_WANTED):
                        message = decode_line(line)
                        if isinstance(message, (Started, Load)):
                            hear(message)
            return True
        finally:
            answer.abort()

    async def _ask(
        self, origin: Origin, method: str, path: str, body: bytes, timeouts: Timeouts
    ) -> tuple[int, bytes]:
        """Returns status and body; without an answer, status 0 and the reason."""
        try:
            until = time.monotonic() + timeouts.first_byte_s + timeouts.idle_s
            answer = await self._client.ask(
                origin, method, path, [], body, timeouts=timeouts, until=until, fixed=self._fixed
            )
            return answer.status, await answer.read(MAX_BODY)
        except ProxyError as error:
            return 0, str(error).encode()


def _why(status: int, body: bytes) -> str:
    text = body[:300].decode(errors="replace")
    return f"status {status}: {text}" if status else text
