"""Subjects and scripts in Redis' wire form; constant parts are encoded once."""

from __future__ import annotations

import hashlib

from ridgeline.gateway.limits.limiter_types import PICODOLLARS, Subject
from ridgeline.gateway.limits.redis_client import bulk, encode


class Script:
    """A script that Redis has loaded, called by its digest."""

    def __init__(self, text: str) -> None:
        self.load = encode("SCRIPT", "LOAD", text)
        self._sha = hashlib.sha1(text.encode()).hexdigest()
        self._heads: dict[int, bytes] = {}

    def head(self, keys: int, arguments: int) -> bytes:
        """The command up to its keys. `arguments` follows from `keys`, but for RENEW's and SEED's form."""
        head = self._heads.get(keys)
        if head is None:
            head = b"*%d\r\n" % (3 + keys + arguments) + bulk("EVALSHA") + bulk(self._sha) + bulk(keys)
            self._heads[keys] = head
        return head


class Wire:
    """A subject in Redis' wire form, made once."""

    __slots__ = ("has", "has_background", "key", "leased", "limits", "of")

    def __init__(self, prefix: str, subject: Subject) -> None:
        limits = self.of = subject.limits
        budget = limits.daily_usd is not None or limits.monthly_usd is not None
        self.leased = budget or limits.concurrent is not None
        self.key = bulk(f"{prefix}:{subject.kind}:{subject.id}")
        numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)
        money = (_picodollars(limits.daily_usd), _picodollars(limits.monthly_usd))
        self.limits = b"".join(bulk(-1 if value is None else value) for value in (*numbers, *money))
        tokens = "t" * (limits.tokens_per_minute is not None)
        self.has = bulk(tokens + "l" * self.leased + "m" * budget or "-")
        self.has_background = bulk(tokens + "hm" * budget or "-")


def _picodollars(usd: float | None) -> int | None:
    return None if usd is None else int(usd * PICODOLLARS)
