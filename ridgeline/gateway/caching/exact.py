"""ExactCache: the answer to an identical request of the same tenant, from memory or from Redis.

The pipeline reads it before it calls an upstream, and afterwards stores the answer sent to the client. Redis
is optional: a slow or unreachable Redis costs hits, never a request; it is not called for PAUSE_S seconds
after a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from ridgeline.gateway.accounting.row import Outcome
from ridgeline.gateway.caching.answer import Hit, Recorder, StoredAnswer
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.caching.memory import AnswerMemory
from ridgeline.gateway.observe.metrics import CacheReading

FORM = b":cache:1:"  # in key names; the number changes with the stored format
PAUSE_S = 1.0  # after a failure, before Redis is called again
MAX_WRITING = 256  # writes to Redis in flight; further answers are stored in memory only

_decode = msgspec.msgpack.Decoder(StoredAnswer).decode
_encode = msgspec.msgpack.Encoder().encode


class Redis(Protocol):
    """Runs one command with its own deadline; raises any exception if there is no answer.

    The cache has its own connection: a limit must not wait behind another request's long answer.
    """

    def call(self, *parts: bytes) -> Awaitable[Any]: ...


class ExactCache:
    def __init__(
        self,
        config: CacheConfig,
        redis: Redis | None = None,
        prefix: str = "ridgeline",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.hits = self.misses = self.failures = 0
        self._config = config
        self._redis = redis
        self._prefix = prefix.encode() + FORM
        self._clock = clock
        self._memory = AnswerMemory(config.max_bytes, config.ttl_s)
        self._paused_until = 0.0
        self._writing: set[asyncio.Task[None]] = set()

    async def get(self, partition: bytes) -> Hit | None:
        now = self._clock()
        answer = self._memory.get(partition, now)
        if answer is None and self._redis is not None and not self.paused:
            answer = await self._fetch(self._redis, partition, now)
        if answer is None:
            self.misses += 1
            return None
        self.hits += 1
        return Hit(answer, now - answer.stored_at)

    def put(self, partition: bytes, answer: StoredAnswer, outcome: Outcome) -> None:
        """Store a complete, successful answer; ignore others."""
        if not keepable(answer, outcome, self._config):
            return
        self._memory.put(partition, answer)
        if self._redis is None or self.paused or len(self._writing) >= MAX_WRITING:
            return
        task = asyncio.get_running_loop().create_task(self._send(self._redis, partition, answer))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def recorder(self) -> Recorder:
        return Recorder(self._config.max_answer_bytes)

    def reading(self) -> CacheReading:
        memory = self._memory
        return CacheReading("exact", self.hits, self.misses, len(memory), memory.bytes, memory.evictions)

    @property
    def paused(self) -> bool:
        """Whether Redis failed in the last PAUSE_S seconds."""
        return time.monotonic() < self._paused_until

    async def drain(self) -> None:
        """Wait until Redis has stored the answers that were put."""
        while self._writing:
            await asyncio.wait(self._writing)

    async def _fetch(self, redis: Redis, partition: bytes, now: float) -> StoredAnswer | None:
        try:
            stored = await redis.call(b"GET", self._prefix + partition.hex().encode())
            if stored is None:
                return None
            answer = _decode(stored)
        except Exception:
            self._failed()
            return None
        if now - answer.stored_at >= self._config.ttl_s:
            return None
        self._memory.put(partition, answer)
        return answer

    async def _send(self, redis: Redis, partition: bytes, answer: StoredAnswer) -> None:
        lifetime_ms = b"%d" % max(self._config.ttl_s * 1e3, 1)
        try:
            await redis.call(
                b"SET", self._prefix + partition.hex().encode(), _encode(answer), b"PX", lifetime_ms
            )
        except Exception:
            self._failed()

    def _failed(self) -> None:
        self.failures += 1
        self._paused_until = time.monotonic() + PAUSE_S


def keepable(answer: StoredAnswer, outcome: Outcome, config: CacheConfig) -> bool:
    """Whether to store it: no errors, no interrupted or blocked answers, none over the size limit."""
    return outcome == "ok" and answer.status == 200 and len(answer.body) <= config.max_answer_bytes
