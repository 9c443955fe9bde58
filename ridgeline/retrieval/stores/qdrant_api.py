"""QdrantApi: calls of Qdrant's REST interface. Errors become those of retrieval; no message holds the key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin, read_url
from ridgeline.proxy.request_head import Headers
from ridgeline.retrieval.errors import BadInput, RetrievalError, StoreUnavailable

Condition: TypeAlias = dict[str, Any]
Point: TypeAlias = dict[str, Any]
MOST_ANSWER_BYTES = 1 << 30
_PAGE = 2_000  # points of one answer


class QdrantApi:
    """`ask` returns the `result` of an answer. Every change waits until it is applied."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self._origin: Origin = read_url(url, where="the URL of Qdrant")
        self._headers: Headers = [(b"content-type", b"application/json")]
        if key:
            self._headers.append((b"api-key", key.encode()))
        self._timeouts = Timeouts(connect_s=min(5.0, timeout_s), first_byte_s=timeout_s, idle_s=timeout_s)
        self._client: HttpClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, method: str, path: str, body: object = None, known: Sequence[int] = ()) -> Any:
        """known: statuses that are answered by None instead of an error."""
        sent = b"" if body is None else _encoded(body)
        try:
            answer = await self._client_here().ask(
                self._origin, method, path, self._headers, sent, timeouts=self._timeouts
            )
            data = await answer.read(MOST_ANSWER_BYTES)
        except ProxyError as error:
            raise StoreUnavailable(f"Qdrant at {self._origin.authority}: {error}") from error
        if answer.status in known:
            return None
        if answer.status >= 400:
            raise self._error(answer.status, data)
        return msgspec.json.decode(data)["result"]

    async def upsert(self, collection: str, points: Sequence[Point]) -> None:
        if points:
            path = f"/collections/{collection}/points?wait=true"
            await self.ask("PUT", path, {"points": list(points)})

    async def set_payload(self, collection: str, payload: object, where: Condition) -> None:
        """One change of all points that match when it is applied."""
        path = f"/collections/{collection}/points/payload?wait=true"
        await self.ask("POST", path, {"payload": payload, "filter": where})

    async def delete(self, collection: str, where: Condition) -> None:
        await self.ask("POST", f"/collections/{collection}/points/delete?wait=true", {"filter": where})

    async def found(
        self, collection: str, where: Condition, payload: object = True, vectors: bool = False
    ) -> list[Point]:
        """All points that match, by id."""
        points: list[Point] = []
        offset = None
        while True:
            asked = {
                "filter": where,
                "limit": _PAGE,
                "offset": offset,
                "with_payload": payload,
                "with_vector": vectors,
            }
            result = await self.ask("POST", f"/collections/{collection}/points/scroll", asked)
            points += result["points"]
            offset = result.get("next_page_offset")
            if offset is None:
                return points

    async def by_number(
        self, collection: str, where: list[Condition], above: int, payload: object
    ) -> list[Point]:
        """A page of the points that match, in order of the field `number`, which is above a bound."""
        asked = {
            "filter": {"must": [*where, {"key": "number", "range": {"gt": above}}]},
            "limit": _PAGE,
            "order_by": "number",
            "with_payload": payload,
        }
        result = await self.ask("POST", f"/collections/{collection}/points/scroll", asked)
        points: list[Point] = result["points"]
        return points

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _client_here(self) -> HttpClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = HttpClient(), loop
        return self._client

    def _error(self, status: int, data: bytes) -> RetrievalError:
        try:
            told = str(msgspec.json.decode(data)["status"]["error"])
        except (msgspec.DecodeError, KeyError, TypeError):
            told = data[:200].decode(errors="replace")
        where = f"Qdrant at {self._origin.authority}"
        if status in (401, 403):
            return StoreUnavailable(f"{where} rejected the API key ({status}). Check the key of the store.")
        if status >= 500 or status == 429:
            return StoreUnavailable(f"{where} answered {status}: {told}")
        return BadInput("store", f"{where} refused a request ({status}): {told}")


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, msgspec.EncodeError) as error:
        raise BadInput("document", f"has a text that is not valid Unicode: {error}") from None


def matches(key: str, value: str | int | bool) -> Condition:
    return {"key": key, "match": {"value": value}}


def one_of(key: str, values: Sequence[str]) -> Condition:
    return {"key": key, "match": {"any": list(values)}}


def within(key: str, **bounds: float) -> Condition:
    """bounds: gt, gte, lt, lte."""
    return {"key": key, "range": bounds}
