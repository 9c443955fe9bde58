"""Limiters on the Redis that the tests of a process share, each test under its own prefix."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ridgeline.gateway.limits.config import RedisConfig
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.limits.resp import RedisClient

MIDNIGHT_MS = 1_793_491_200_000  # 2026-11-01 00:00 UTC


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def config(url: str, **values: Any) -> RedisConfig:
    values = {"timeout_ms": 60_000, "prefix": f"test:{uuid.uuid4().hex}", **values}  # the machine may be busy
    return RedisConfig(url=url, **values)


@contextlib.asynccontextmanager
async def limiter(settings: RedisConfig, *arguments: Any, **clocks: Any) -> AsyncIterator[RedisLimiter]:
    made = RedisLimiter(settings, *arguments, **clocks)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def call(settings: RedisConfig, *parts: str) -> Any:
    client = RedisClient(settings)
    await client.start()
    try:
        return await client.call(*parts)
    finally:
        await client.close()


async def settled(made: RedisLimiter) -> None:
    """Everything that was sent has been answered: answers come in order."""
    await made._link.client.call("PING")
