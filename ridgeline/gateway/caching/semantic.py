"""SemanticCache: the stored answer to a question with the same meaning in an otherwise equal request.

Tenant, model, system prompt, tools, earlier turns and parameters must be equal (the partition); only the last
user message is compared, by the cosine of embeddings from a ridgeline engine. Off by default.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.gateway.accounting.row import Outcome
from ridgeline.gateway.body import Fields
from ridgeline.gateway.caching.answer import Hit, StoredAnswer
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.caching.exact import keepable
from ridgeline.gateway.caching.partition import partition
from ridgeline.gateway.caching.wording import Wording
from ridgeline.gateway.observe.metrics import CacheReading

Vectors = npt.NDArray[np.float32]

MOST_COMPARED = 16  # similar questions whose words are compared
_BUCKET_BYTES = 1024  # overhead of the objects around a bucket, roughly
_WORDING_BYTES = 4096  # of a question's words: an upper estimate
_messages = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Embedder(Protocol):
    async def embed(self, texts: Sequence[str]) -> Vectors:
        """A row of length 1 for each text. Raises if the embedder fails."""


@dataclass(slots=True)
class SemanticQuery:
    partition: bytes
    text: str
    vector: Vectors | None = None  # set by `get`


class _Message(msgspec.Struct):
    role: str
    content: Any = None


class SemanticCache:
    def __init__(
        self, config: CacheConfig, embedder: Embedder, clock: Callable[[], float] = time.time
    ) -> None:
        self.hits = self.misses = self.failures = self.evictions = 0
        self._config = config
        self._embedder = embedder
        self._clock = clock
        self._buckets: OrderedDict[bytes, _Bucket] = OrderedDict()  # the least recently used first
        self._bytes = 0

    def query(
        self, tenant: str, model: str, kind: str, fields: Fields, variants: Sequence[str] = ()
    ) -> SemanticQuery | None:
        """None: the last message of this request cannot be compared."""
        taken = _last_user_text(kind, fields)
        if taken is None:
            return None
        text, rest = taken
        if not text.strip() or len(text.encode("utf-8", "surrogatepass")) > self._config.semantic_text_bytes:
            return None
        return SemanticQuery(partition(tenant, model, kind, rest, ("semantic", *variants)), text)

    async def get(self, query: SemanticQuery, threshold: float | None = None) -> Hit | None:
        """The answer of the most similar question, if it is similar enough. Without a vector: a miss."""
        try:
            query.vector = (await self._embedder.embed([query.text]))[0]
        except Exception:
            self.failures += 1
            return None
        now = self._clock()
        bucket = self._buckets.get(query.partition)
        if bucket is not None:
            self._buckets.move_to_end(query.partition)
            self._bytes -= bucket.expire(now - self._config.ttl_s)
            least = self._config.semantic_threshold if threshold is None else threshold
            wording = Wording.of(query.text) if self._config.semantic_strict else None
            found = bucket.nearest(query.vector, least, wording)
            if found is not None:
                self.hits += 1
                return Hit(found[0], now - found[0].stored_at, found[1])
        self.misses += 1
        return None

    def put(self, query: SemanticQuery, answer: StoredAnswer, outcome: Outcome) -> None:
        if query.vector is None or not keepable(answer, outcome, self._config):
            return
        bucket = self._buckets.get(query.partition)
        if bucket is not None and bucket.dimensions != len(query.vector):
            self._bytes -= bucket.bytes  # another embedding model: the old vectors are useless
            del self._buckets[query.partition]
            bucket = None
        if bucket is None:
            bucket = self._buckets[query.partition] = _Bucket(len(query.vector))
            self._bytes += bucket.bytes
        before = bucket.bytes
        entry = (Wording.of(query.text), answer)
        self.evictions += bucket.add(query.vector, entry, self._config.semantic_entries)
        self._bytes += bucket.bytes - before
        self._buckets.move_to_end(query.partition)
        while self._bytes > self._config.semantic_max_bytes and self._buckets:
            _, old = self._buckets.popitem(last=False)
            self._bytes -= old.bytes
            self.evictions += len(old)

    def reading(self) -> CacheReading:
        entries = sum(map(len, self._buckets.values()))
        return CacheReading("semantic", self.hits, self.misses, entries, self._bytes, self.evictions)


class _Bucket:
    """The questions of one partition, oldest first: a matrix of vectors and a list of answers."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.bytes = _BUCKET_BYTES
        self._vectors: Vectors = np.empty((0, dimensions), np.float32)
        self._answers: list[tuple[Wording, StoredAnswer]] = []

    def __len__(self) -> int:
        return len(self._answers)

    def nearest(
        self, vector: Vectors, least: float, wording: Wording | None
    ) -> tuple[StoredAnswer, float] | None:
        """The most similar answer above the threshold whose wording agrees."""
        if len(vector) != self.dimensions or not self._answers:
            return None
        similarities = self._vectors[: len(self._answers)] @ vector
        (near,) = np.nonzero(similarities >= least)
        for index in near[np.argsort(-similarities[near])][:MOST_COMPARED]:
            kept, answer = self._answers[index]
            if wording is None or wording.agrees(kept):
                return answer, min(float(similarities[index]), 1.0)
        return None

    def add(self, vector: Vectors, entry: tuple[Wording, StoredAnswer], most: int) -> int:
        """Returns how many old answers were evicted."""
        gone = max(len(self._answers) + 1 - most, 0)
        self._drop(gone)
        count = len(self._answers)
        if count == len(self._vectors):
            grown = np.empty((min(max(2 * count, 8), most), self.dimensions), np.float32)
            grown[:count] = self._vectors
            self.bytes += grown.nbytes - self._vectors.nbytes
            self._vectors = grown
        self._vectors[count] = vector
        self._answers.append(entry)
        self.bytes += entry[1].size + _WORDING_BYTES
        return gone

    def expire(self, before: float) -> int:
        """Drop answers stored before this time; returns the bytes that were freed."""
        stale = 0
        while stale < len(self._answers) and self._answers[stale][1].stored_at <= before:
            stale += 1
        bytes_before = self.bytes
        self._drop(stale)
        return bytes_before - self.bytes

    def _drop(self, count: int) -> None:
        if count == 0:
            return
        left = len(self._answers) - count
        self.bytes -= sum(answer.size + _WORDING_BYTES for _, answer in self._answers[:count])
        self._vectors[:left] = self._vectors[count : count + left].copy()
        del self._answers[:count]


def _last_user_text(kind: str, fields: Fields) -> tuple[str, Fields] | None:
    """The last user message's text, and the fields without it."""
    name = {"chat": "messages", "messages": "messages", "responses": "input"}.get(kind)
    if name is None or name not in fields:
        return None
    try:
        if kind == "responses" and bytes(fields[name])[:1] == b'"':
            return msgspec.json.decode(fields[name], type=str), {**fields, name: msgspec.Raw(b"null")}
        messages = _messages.decode(fields[name])
        if not messages:
            return None
        last = msgspec.json.decode(messages[-1], type=dict[str, msgspec.Raw])
        head = msgspec.json.decode(messages[-1], type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # malformed: the upstream reports it
    text = _plain_text(head.content)
    if head.role != "user" or text is None:
        return None
    # Other fields of the message (a name, a cache mark) and the shape of its content belong to the partition.
    rest = {key: value for key, value in sorted(last.items()) if key != "content"}
    shape = type(head.content).__name__ + (str(len(head.content)) if isinstance(head.content, list) else "")
    hole = msgspec.Raw(_encode([*messages[:-1], rest, shape]))
    return text, {**fields, name: hole}


def _plain_text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = []
    for part in content:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            return None  # an image, a tool result, a cache mark for the provider
        texts.append(part["text"])
    return "\n".join(texts)
