"""The CPU time of one reservation and its settlement: in memory, by our Redis client, and by redis-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ridgeline.gateway.limits import scripts
from ridgeline.gateway.limits.limiter_types import Limiter, Subject
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.services import OwnRedis

EVERY = Limits(10**8, 10**12, 10**5, 1e6, 1e7)
TWO = (Subject("key", "k", EVERY), Subject("team", "t", EVERY))


async def cpu_us(work: Callable[[], Awaitable[None]], count: int, at_once: int) -> float:
    """Of this process, the least of five rounds."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(count // at_once):
            await asyncio.gather(*(work() for _ in range(at_once)))
        best = min(best, (time.process_time() - began) / (count // at_once * at_once) * 1e6)
    return best


async def measure_cost() -> dict[str, float]:
    import redis.asyncio

    own = OwnRedis()
    ours = RedisLimiter(RedisConfig(url=own.url, prefix="cost"))
    await ours.start()
    peer = redis.asyncio.Redis(port=own.port)
    reserve, settle = peer.register_script(scripts.RESERVE), peer.register_script(scripts.SETTLE)
    limits = [EVERY.requests_per_minute, EVERY.tokens_per_minute, EVERY.concurrent, 10**18, 10**19]
    numbers = iter(range(10**9))

    def with_limiter(limiter: Limiter) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            limiter.settle(await limiter.reserve(TWO, 500, 1000), 400, 800)

        return work

    async def with_redis_py() -> None:
        id, keys = f"peer{next(numbers)}", ["cost:key:k", "cost:team:t"]
        asked = [id, 0, 500, 1000, 30_000, 500, 1000, 0, *limits, *limits, 1, 1, 300_000]
        answer = await reserve(keys=keys, args=asked)
        at = [int(number) for number in answer.split()][1]
        await settle(keys=[f"cost:settled:{id}", *keys], args=[id, 0, at, at, -100, 800, 0, "tlm", "tlm"])

    nothing = await cpu_us(lambda: asyncio.sleep(0), 2000, 32)
    result = {
        "asyncio alone": nothing,
        "memory": await cpu_us(with_limiter(MemoryLimiter()), 20_000, 32),
        "Redis, 1 at a time": await cpu_us(with_limiter(ours), 2000, 1),
        "Redis, 32 at a time": await cpu_us(with_limiter(ours), 6000, 32),
        "redis-py, 1 at a time": await cpu_us(with_redis_py, 1000, 1),
        "redis-py, 32 at a time": await cpu_us(with_redis_py, 2000, 32),
    }
    await ours.close()
    await peer.aclose()
    own.stop()
    print("CPU time of one reservation and its settlement; a key and a team, each with all five limits")
    for name, us in result.items():
        print(f"  {name:24} {us:7.1f} us")
    return result
