"""Embedder: vectors of texts, from an upstream's /v1/embeddings; used by the router and the semantic cache.

Vectors of recent texts are cached. Every wait has a deadline and the number of concurrent calls is bounded:
beyond these the caller gets EmbeddingFailed and continues without a vector.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.config import EmbeddingsConfig

Vectors = npt.NDArray[np.float32]  # [texts, dimensions], each of length 1
# Sends a body to the upstream's /v1/embeddings and returns the body of a 200; raises otherwise.
Post = Callable[[bytes], Awaitable[bytes]]

WHOLE = -1  # as many characters of a text as the model reads


class EmbeddingFailed(Exception):
    """No vector: the server failed or timed out, or too many calls are in flight. Holds no text."""


class _Vector(msgspec.Struct):
    embedding: str | list[float]
    index: int = 0


class _EmbeddingList(msgspec.Struct):
    data: list[_Vector]


class Embedder:
    """One per worker."""

    def __init__(self, config: EmbeddingsConfig, post: Post) -> None:
        self.config = config
        self._post = post
        self._recent: OrderedDict[bytes, Vectors] = OrderedDict()
        self._coming: dict[bytes, asyncio.Future[Vectors]] = {}  # texts in flight
        self._under_way = 0
        self.hits = self.misses = self.failures = 0

    async def embed(self, texts: Sequence[str], max_tokens: int = WHOLE) -> Vectors:
        """A row for each text, in order. `max_tokens` truncates the text; it is part of the cache key."""
        keys = [_key(text, max_tokens) for text in texts]
        found: dict[bytes, Vectors] = {}
        waits: dict[bytes, asyncio.Future[Vectors]] = {}
        missing: dict[bytes, str] = {}
        for key, text in zip(keys, texts, strict=True):
            known = self._recent.get(key)
            if known is not None:
                self._recent.move_to_end(key)
                found[key] = known
            elif key in self._coming:
                waits[key] = self._coming[key]
            elif key not in missing:
                missing[key] = text
        self.hits += len(found)
        self.misses += len(missing)
        try:
            async with asyncio.timeout(self.config.timeout_ms / 1e3):
                if missing:
                    found.update(await self._ask(missing, max_tokens))
                for key, future in waits.items():
                    found[key] = await asyncio.shield(future)
        except TimeoutError:
            self.failures += 1
            raise EmbeddingFailed(f"no vector within {self.config.timeout_ms:g} ms") from None
        return np.stack([found[key] for key in keys])

    async def _ask(self, missing: dict[bytes, str], max_tokens: int) -> dict[bytes, Vectors]:
        if self._under_way >= self.config.max_concurrent:
            self.failures += 1
            raise EmbeddingFailed(f"{self._under_way} requests for vectors are in flight")
        future: asyncio.Future[Vectors]
        futures = {key: asyncio.get_running_loop().create_future() for key in missing}
        self._coming.update(futures)
        self._under_way += 1
        try:
            vectors = await self._vectors(list(missing.values()), max_tokens)
        except BaseException as error:
            failed = error if isinstance(error, EmbeddingFailed) else EmbeddingFailed("it was not awaited")
            for future in futures.values():
                future.set_exception(failed)
                future.exception()  # retrieved, or asyncio logs the exception
            self.failures += isinstance(error, EmbeddingFailed)
            raise
        finally:
            self._under_way -= 1
            for key in futures:
                del self._coming[key]
        fresh = dict(zip(missing, vectors, strict=True))
        for key, future in futures.items():
            future.set_result(fresh[key])
        self._remember(fresh)
        return fresh

    async def _vectors(self, texts: list[str], max_tokens: int) -> Vectors:
        body: dict[str, Any] = {"model": self.config.model, "input": texts, "encoding_format": "base64"}
        if self.config.truncate:
            body["truncate_prompt_tokens"] = max_tokens
        try:
            answer = await self._post(msgspec.json.encode(body))
        except EmbeddingFailed:
            raise
        except Exception as error:
            raise EmbeddingFailed(f"the embedding server failed ({type(error).__name__})") from error
        return decode(answer, len(texts))

    def _remember(self, fresh: dict[bytes, Vectors]) -> None:
        self._recent.update(fresh)
        while len(self._recent) > self.config.cache_entries:
            self._recent.popitem(last=False)


def decode(answer: bytes, count: int) -> Vectors:
    """The vectors of an answer of /v1/embeddings, at length 1; EmbeddingFailed if it is not one."""
    try:
        data = msgspec.json.decode(answer, type=_EmbeddingList).data
        rows = [_row(vector.embedding) for vector in sorted(data, key=lambda vector: vector.index)]
        vectors: Vectors = np.stack(rows)
    except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise EmbeddingFailed(f"the embedding server's answer is malformed: {error}") from None
    if len(vectors) != count or vectors.ndim != 2 or not np.isfinite(vectors).all():
        raise EmbeddingFailed(
            f"the embedding server sent {len(vectors)} vectors for {count} texts, or malformed ones"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return normalized


def _row(embedding: str | list[float]) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.asarray(embedding, np.float32)


def _key(text: str, max_tokens: int) -> bytes:
    return blake2b(b"%d:%b" % (max_tokens, text.encode("utf-8", "replace")), digest_size=16).digest()
