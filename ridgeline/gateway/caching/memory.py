"""AnswerMemory: an LRU cache of answers by partition, bounded by bytes and age.

Pure logic with an injected clock; held by ExactCache.
"""

from __future__ import annotations

from collections import OrderedDict

from ridgeline.gateway.caching.answer import StoredAnswer


class AnswerMemory:
    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.bytes = 0
        self.evictions = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._answers: OrderedDict[bytes, StoredAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, partition: bytes, now: float) -> StoredAnswer | None:
        answer = self._answers.get(partition)
        if answer is None:
            return None
        if now - answer.stored_at >= self._ttl_s:
            self._drop(partition)
            return None
        self._answers.move_to_end(partition)
        return answer

    def put(self, partition: bytes, answer: StoredAnswer) -> None:
        self._drop(partition)
        if answer.size > self._max_bytes:
            return
        self._answers[partition] = answer
        self.bytes += answer.size
        while self.bytes > self._max_bytes:
            _, old = self._answers.popitem(last=False)
            self.bytes -= old.size
            self.evictions += 1

    def _drop(self, partition: bytes) -> None:
        answer = self._answers.pop(partition, None)
        if answer is not None:
            self.bytes -= answer.size
