"""The services themselves: what other tests take for granted."""

from __future__ import annotations

import asyncpg
import redis

from tests.gateway.services import OwnPostgres, OwnRedis


async def test_a_postgresql_keeps_what_was_committed_when_it_is_stopped_at_once() -> None:
    own = OwnPostgres()
    try:
        connection = await asyncpg.connect(own.url)
        await connection.execute("CREATE TABLE kept (x int)")
        await connection.close()
        own.stop()
        own.start()
        connection = await asyncpg.connect(own.url)
        assert await connection.fetchval("SELECT count(*) FROM kept") == 0
        await connection.close()
    finally:
        own.remove()


def test_a_redis_of_ones_own_starts_empty_again() -> None:
    own = OwnRedis()
    try:
        redis.Redis(port=own.port).set("x", 1)
        own.stop()
        own.start()
        assert redis.Redis(port=own.port).get("x") is None
    finally:
        own.stop()


async def test_each_test_has_a_database_of_its_own(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    assert (await connection.fetchval("SELECT current_database()")).startswith("test_")
    await connection.close()
