"""CacheUse: one request's lookups and writes in the caches.

Made by the pipeline once model and guard are known. It takes the fields after the guard, and stores the
answer before the guard restores it: data that a guard redacted is neither cached nor embedded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.caching.answer import Headers, Hit, Recorder, StoredAnswer
from ridgeline.gateway.caching.partition import HEADER, partition, wanted
from ridgeline.gateway.offload.offload import is_large

if TYPE_CHECKING:
    from ridgeline.gateway.caching.exact import ExactCache
    from ridgeline.gateway.caching.semantic import SemanticCache, SemanticQuery
    from ridgeline.gateway.catalog import PublicModel
    from ridgeline.gateway.pipeline.parts import Parts
    from ridgeline.gateway.pipeline.request_state import RequestState

# Client headers that change an upstream's answer.
_TELLING = (b"anthropic-beta", b"anthropic-version", b"openai-beta")


class StreamKeeper:
    """A stage of a streamed answer that records the bytes and passes them on unchanged."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def feed(self, data: bytes) -> bytes:
        self.recorder.add(data)
        return data

    def finish(self) -> bytes:
        return b""


class CacheUse:
    def __init__(
        self,
        request: RequestState,
        exact: ExactCache,
        place: bytes,
        semantic: SemanticCache | None,
        query: SemanticQuery | None,
        threshold: float | None,
    ) -> None:
        self._request = request
        self._exact = exact
        self._place = place
        self._semantic = semantic
        self._query = query
        self._threshold = threshold

    @classmethod
    def of(cls, parts: Parts, request: RequestState, model: PublicModel) -> CacheUse | None:
        """None: this request does not use the caches."""
        key, kind, fields = request.key, request.place.endpoint.kind, request.fields
        given = request.headers
        if key is None or parts.exact is None or not fields:
            return None
        header = given.get(HEADER, b"")
        if not header and key.cache == "off":
            return None
        mode = wanted(parts.settings.cache, key.cache, header, kind, fields)
        if mode == "off":
            return None
        variants = [key.guard]
        variants += [given.get(name, b"").decode("latin-1") for name in _TELLING]
        variants.append(request.query.decode("latin-1"))
        place = partition(request.tenant, model.name, kind, fields, variants)
        query, semantic = None, None
        if mode == "semantic" and parts.semantic is not None and not is_large(fields):
            semantic = parts.semantic
            query = semantic.query(request.tenant, model.name, kind, fields, variants)
        return cls(request, parts.exact, place, semantic, query, model.config.semantic_threshold)

    async def find(self) -> Hit | None:
        hit = await self._exact.get(self._place)
        if hit is None and self._semantic is not None and self._query is not None:
            hit = await self._semantic.get(self._query, self._threshold)
        return hit

    async def keep(self, status: int, headers: Headers, body: bytes, usage: Usage | None) -> None:
        """Store a whole answer, before a guard restores it."""
        row = self._request.row
        content_type = next(
            (value for name, value in headers if name == b"content-type"), b"application/json"
        )
        answer = StoredAnswer(
            status,
            content_type.decode("latin-1"),
            body,
            row.model,
            row.upstream,
            row.upstream_model,
            time.time(),
            usage or Usage(),
        )
        self._exact.put(self._place, answer, row.outcome)
        if self._semantic is not None and self._query is not None:
            self._semantic.put(self._query, answer, row.outcome)

    def stream_keeper(self) -> StreamKeeper:
        return StreamKeeper(self._exact.recorder())

    async def keep_stream(
        self, keeper: StreamKeeper, status: int, headers: Headers, usage: Usage | None
    ) -> None:
        """Store a stream that ended normally."""
        body = keeper.recorder.body
        if body is not None:
            await self.keep(status, headers, body, usage)
