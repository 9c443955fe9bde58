"""HeldBytes: the bytes of request bodies that a worker holds, bounded for each key and for all keys together.

Counted as they arrive, released when their request ends. An announced length that does not fit is refused
before a byte of it is read. One instance counts memory, another the disk space of uploads.
"""

from __future__ import annotations

from collections import Counter

from ridgeline.gateway.errors import Limited, Unavailable

RETRY_S = 1  # the end of a running request is unknown


class HeldBytes:
    def __init__(self, most: int, most_per_key: int, setting: str) -> None:
        """setting: the option that an operator changes to allow more."""
        self.most, self.most_per_key = most, most_per_key
        self.total = 0
        self._setting = setting
        self._by_key: Counter[str] = Counter()

    def of_key(self, key_id: str) -> int:
        return self._by_key[key_id]

    def hold(self, key_id: str) -> Held:
        return Held(self, key_id)

    def check(self, key_id: str, more: int) -> None:
        """Raises if `more` bytes do not fit beside those that are held."""
        if self._by_key[key_id] + more > self.most_per_key:
            message = (
                f"the bodies of this key's running requests would exceed {self.most_per_key} bytes "
                f"({self._setting}_per_key)"
            )
            raise Limited(message, RETRY_S, code="too_many_bytes")
        if self.total + more > self.most:
            message = f"the bodies of all running requests would exceed {self.most} bytes ({self._setting})"
            raise Unavailable(message, code="too_many_bytes", headers={"retry-after": str(RETRY_S)})

    def _add(self, key_id: str, more: int) -> None:
        self.total += more
        self._by_key[key_id] += more
        if not self._by_key[key_id]:
            del self._by_key[key_id]


class Held:
    """The bytes of one request."""

    __slots__ = ("_all", "_key_id", "size")

    def __init__(self, all_held: HeldBytes, key_id: str) -> None:
        self._all, self._key_id, self.size = all_held, key_id, 0

    def expect(self, announced: int) -> None:
        self._all.check(self._key_id, announced)

    def add(self, more: int) -> None:
        self._all.check(self._key_id, more)
        self._all._add(self._key_id, more)
        self.size += more

    def release(self) -> None:
        self._all._add(self._key_id, -self.size)
        self.size = 0
