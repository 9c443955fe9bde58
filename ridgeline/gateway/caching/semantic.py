"""SemanticCache: the answer to a question that means the same, where everything around it is the same.

Tenant, model, system prompt, tools, earlier turns and parameters are a hard partition; only the last user
message is compared, by the cosine of vectors from our own engine. Off unless a key or an operator wants it.
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

MOST_COMPARED = 16  # similar questions whose words are looked at
_SHELF_BYTES = 1024  # of objects around a shelf, roughly
_WORDING_BYTES = 4096  # of a question's words, at most about that
_messages = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Embedder(Protocol):
    async def embed(self, texts: Sequence[str]) -> Vectors:
        """A row of length 1 for each text. Raises where there is none to be had."""


@dataclass(slots=True)
class Question:
    partition: bytes
    text: str
    vector: Vectors | None = None  # once it was looked up


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
        self._shelves: OrderedDict[bytes, _Shelf] = OrderedDict()  # the least recently used first
        self._bytes = 0

    def question(
        self, tenant: str, model: str, kind: str, fields: Fields, variants: Sequence[str] = ()
    ) -> Question | None:
        """None: this request's last message is not one that can be compared."""
        taken = _last_user_text(kind, fields)
        if taken is None:
            return None
        text, rest = taken
        if not text.strip() or len(text.encode("utf-8", "surrogatepass")) > self._config.semantic_text_bytes:
            return None
        return Question(partition(tenant, model, kind, rest, ("semantic", *variants)), text)

    async def get(self, question: Question, threshold: float | None = None) -> Hit | None:
        """The most similar question's answer, if it is similar enough. No vector: no hit."""
        try:
            question.vector = (await self._embedder.embed([question.text]))[0]
        except Exception:
            self.failures += 1
            return None
        now = self._clock()
        shelf = self._shelves.get(question.partition)
        if shelf is not None:
            self._shelves.move_to_end(question.partition)
            self._bytes -= shelf.expire(now - self._config.ttl_s)
            least = self._config.semantic_threshold if threshold is None else threshold
            wording = Wording.of(question.text) if self._config.semantic_strict else None
            found = shelf.nearest(question.vector, least, wording)
            if found is not None:
                self.hits += 1
                return Hit(found[0], now - found[0].stored_at, found[1])
        self.misses += 1
        return None

    def put(self, question: Question, answer: StoredAnswer, outcome: Outcome) -> None:
        if question.vector is None or not keepable(answer, outcome, self._config):
            return
        shelf = self._shelves.get(question.partition)
        if shelf is not None and shelf.dimensions != len(question.vector):
            self._bytes -= shelf.bytes  # another embedding model: the old vectors say nothing any more
            del self._shelves[question.partition]
            shelf = None
        if shelf is None:
            shelf = self._shelves[question.partition] = _Shelf(len(question.vector))
            self._bytes += shelf.bytes
        before = shelf.bytes
        entry = (Wording.of(question.text), answer)
        self.evictions += shelf.add(question.vector, entry, self._config.semantic_entries)
        self._bytes += shelf.bytes - before
        self._shelves.move_to_end(question.partition)
        while self._bytes > self._config.semantic_max_bytes and self._shelves:
            _, old = self._shelves.popitem(last=False)
            self._bytes -= old.bytes
            self.evictions += len(old)

    def reading(self) -> CacheReading:
        entries = sum(map(len, self._shelves.values()))
        return CacheReading("semantic", self.hits, self.misses, entries, self._bytes, self.evictions)


class _Shelf:
    """The questions of one partition, oldest first: a matrix of vectors and a list beside it."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.bytes = _SHELF_BYTES
        self._vectors: Vectors = np.empty((0, dimensions), np.float32)
        self._answers: list[tuple[Wording, StoredAnswer]] = []

    def __len__(self) -> int:
        return len(self._answers)

    def nearest(
        self, vector: Vectors, least: float, wording: Wording | None
    ) -> tuple[StoredAnswer, float] | None:
        """The most similar of those that are similar enough and whose words do not speak against it."""
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
        """How many old ones went for it."""
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
        """Bytes that answers stored before then had taken."""
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
    """The last user message's text, and the fields with a hole where it was."""
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
        return None  # whatever it is, the upstream will say so
    text = _plain_text(head.content)
    if head.role != "user" or text is None:
        return None
    # Other fields of the message (a name, a cache mark) and the shape of its content are parameters too.
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
            return None  # an image, a tool's result, a mark for a provider's cache
        texts.append(part["text"])
    return "\n".join(texts)
