"""Limiters on the Redis that the tests of a process share, each test under its own prefix."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ridgeline.gateway.limits.redis_client import RedisClient
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from tests.patience import PATIENCE_S

# The machine may be busy: what a test expects to be answered is waited for.
PATIENT = {"timeout_ms": 60_000, "connect_timeout_ms": 60_000}
MIDNIGHT_MS = 1_793_491_200_000  # 2026-11-01 00:00 UTC


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


def config(url: str, **values: Any) -> RedisConfig:
    return RedisConfig(url=url, **{**PATIENT, "prefix": f"test:{uuid.uuid4().hex}", **values})


def set_deadline(client: RedisClient, seconds: float) -> None:
    """For answers from now on, also of the connection that there is."""
    client._timeout_s = seconds
    connection = client._connection
    if connection is not None:
        connection._timeout_s = seconds
        if connection._timer is not None:
            connection._timer.cancel()
        connection._check_deadline()


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
