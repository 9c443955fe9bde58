"""The exact cache: what it keeps, for how long, how much of it, and that Redis is only an extra."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.caching.answer import Hit, Recorder, StoredAnswer
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.caching.exact import ExactCache
from ridgeline.gateway.caching.memory import AnswerMemory
from ridgeline.gateway.limits.redis_client import RedisClient
from ridgeline.gateway.limits.redis_config import RedisConfig
from tests.clock import Clock
from tests.gateway.limits.shared_redis import PATIENT, set_deadline
from tests.gateway.services import OwnRedis
from tests.patience import PATIENCE_S


def stored(body: bytes = b"answer", at: float = 1000.0, status: int = 200) -> StoredAnswer:
    return StoredAnswer(status, "application/json", body, "small", "local", "m", at, Usage(3, tokens_out=4))


async def test_an_answer_comes_back_byte_for_byte_with_its_age() -> None:
    clock = Clock(1000.0)
    cache = ExactCache(CacheConfig(), clock=clock)
    assert await cache.get(b"p") is None
    cache.put(b"p", stored(b'data: {"a": 1}\n\n'), "ok")
    clock.now += 7.5
    hit = await cache.get(b"p")
    assert hit is not None
    assert hit.answer == stored(b'data: {"a": 1}\n\n')
    assert hit.headers == [
        (b"content-type", b"application/json"),
        (b"x-ridgeline-cache", b"hit"),
        (b"age", b"7"),
    ]
    reading = cache.reading()
    assert (reading.hits, reading.misses, reading.entries) == (1, 1, 1)


async def test_an_answer_that_is_too_old_is_gone() -> None:
    clock = Clock(1000.0)
    cache = ExactCache(CacheConfig(ttl_s=10), clock=clock)
    cache.put(b"p", stored(), "ok")
    clock.now += 10
    assert await cache.get(b"p") is None
    assert cache.reading().bytes == 0


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (500, "ok"),
        (429, "ok"),
        (200, "client_gone"),
        (200, "upstream_failed"),
        (200, "blocked"),
        (400, "refused"),
    ],
)
async def test_errors_and_what_was_broken_off_or_blocked_are_never_kept(status: int, outcome: Any) -> None:
    cache = ExactCache(CacheConfig())
    cache.put(b"p", stored(status=status), outcome)
    assert await cache.get(b"p") is None


async def test_a_large_answer_is_not_kept() -> None:
    cache = ExactCache(CacheConfig(max_answer_bytes=100))
    cache.put(b"p", stored(b"x" * 101), "ok")
    assert await cache.get(b"p") is None
    recorder: Recorder = cache.recorder()
    recorder.add(b"x" * 60)
    assert recorder.body == b"x" * 60
    recorder.add(b"x" * 60)
    recorder.add(b"")
    assert recorder.body is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000), st.booleans()), max_size=40))
def test_memory_holds_at_most_its_bytes_and_gives_up_the_least_recently_used(steps: Any) -> None:
    memory = AnswerMemory(max_bytes=5000, ttl_s=60)
    order: list[bytes] = []  # the model: most recently used last
    held: dict[bytes, int] = {}
    for name, size, is_put in steps:
        key = bytes([name])
        if is_put:
            answer = stored(b"x" * size)
            memory.put(key, answer)
            if key in held:
                order.remove(key)
            order.append(key)
            held[key] = answer.size
            while sum(held.values()) > 5000:
                del held[order.pop(0)]
        else:
            assert (memory.get(key, 1000.0) is not None) == (key in held)
            if key in held:
                order.remove(key)
                order.append(key)
        assert memory.bytes == sum(held.values())
        assert len(memory) == len(held)


class BrokenRedis:
    calls = 0

    async def call(self, *parts: bytes) -> Any:
        self.calls += 1
        raise ConnectionError  # as RedisClient does at once while there is no connection


async def test_a_redis_that_is_gone_costs_hits_and_is_left_alone_for_a_while() -> None:
    redis = BrokenRedis()
    cache = ExactCache(CacheConfig(place="redis"), redis)
    for number in range(100):
        assert await cache.get(bytes([number])) is None
    assert redis.calls == 1
    cache.put(b"p", stored(at=1e12), "ok")
    await cache.drain()
    assert isinstance(await cache.get(b"p"), Hit)
    assert cache.failures == 1


class PlayedRedis:
    """What stands in Redis may be of another version, or not ours."""

    async def call(self, *parts: bytes) -> Any:
        return b"\x93junk"


async def test_what_cannot_be_read_is_a_miss() -> None:
    cache = ExactCache(CacheConfig(place="redis"), PlayedRedis())
    assert await cache.get(b"p") is None
    await asyncio.sleep(0)


def config_of(url: str) -> RedisConfig:
    return RedisConfig(url=url, **PATIENT)


async def test_workers_share_answers_through_redis_until_they_are_too_old(redis_url: str) -> None:
    clients = [RedisClient(config_of(redis_url)) for _ in range(2)]
    for client in clients:
        await client.start()
    place, prefix, clock = uuid.uuid4().bytes, f"test-{uuid.uuid4().hex}", Clock(1000.0)
    one, other = (ExactCache(CacheConfig(ttl_s=100), client, prefix, clock) for client in clients)
    one.put(place, stored(b"\x00\r\n" * 30_000), "ok")
    await one.drain()
    clock.now += 5
    hit = await other.get(place)
    assert hit is not None
    assert (hit.answer, hit.age_s) == (stored(b"\x00\r\n" * 30_000), 5.0)
    assert await other.get(uuid.uuid4().bytes) is None
    [lifetime_ms] = [
        await clients[0].call("PTTL", name) for name in await clients[0].call("KEYS", f"{prefix}*")
    ]
    assert 0 < lifetime_ms <= 100_000
    clock.now += 95
    assert await other.get(place) is None
    third = ExactCache(CacheConfig(ttl_s=100), clients[0], prefix, clock)
    assert await third.get(place) is None  # though Redis' own clock still holds it
    for client in clients:
        await client.close()


async def test_requests_go_on_while_redis_hangs_or_is_away_and_use_it_again_afterwards() -> None:
    redis = OwnRedis()
    client = RedisClient(config_of(redis.url))
    await client.start()
    cache = ExactCache(CacheConfig(), client)
    set_deadline(client, 0.2)
    redis.pause()
    for number in range(20):
        assert await cache.get(bytes([number])) is None
        cache.put(bytes([number]), stored(at=time.time()), "ok")
    await cache.drain()
    assert isinstance(await cache.get(b"\x01"), Hit)
    redis.resume()
    set_deadline(client, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while not client.available or cache.paused:
            await asyncio.sleep(0.02)
    cache.put(b"new", stored(at=time.time()), "ok")
    await cache.drain()
    assert isinstance(await ExactCache(CacheConfig(), client).get(b"new"), Hit)
    await client.close()
    redis.stop()
