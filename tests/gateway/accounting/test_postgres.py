"""The ledger in a real PostgreSQL: stopped, started, killed clients; nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.accounting.store.places import postgres_ledger
from tests.gateway.accounting.books import AWAY, QUICK, opening, row, started
from tests.gateway.services import OwnPostgres
from tests.gateway.waiting import until


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    own = OwnPostgres()
    yield own
    own.remove()


def test_rows_are_stored_once_with_every_kind_of_value(postgres_url: str) -> None:
    store = postgres_ledger(postgres_url)
    first = row(1, stream=True, similarity=0.5, model_asked="a \0 zero", ttft_ms=None)
    assert store.insert([first, row(2)]) == 2
    assert store.insert([row(2, tokens_in=99), row(3)]) == 1
    columns = "request_id, stream, similarity, model_asked, ttft_ms, tokens_in"
    assert store.query(f"SELECT {columns} FROM ridgeline_ledger WHERE tokens_in < ? ORDER BY 1", (13,)) == [
        ("req_000001", True, 0.5, "a \ufffd zero", None, 11),
        ("req_000002", False, None, "", None, 12),
    ]
    assert store.known(["req_000003", "req_000004"]) == {"req_000003"}
    store.close()


def test_old_rows_are_removed_in_batches(postgres_url: str) -> None:
    store = postgres_ledger(postgres_url)
    store.insert([row(number, at_ms=number) for number in range(25)])
    assert [store.remove_before(20, 15), store.remove_before(20, 15), store.remove_before(20, 15)] == [
        15,
        5,
        0,
    ]
    assert store.query("SELECT count(*) FROM ridgeline_ledger") == [(5,)]
    store.close()


async def test_a_row_that_postgresql_refuses_is_set_aside(postgres_url: str, tmp_path: Path) -> None:
    async with started(tmp_path, store_url=postgres_url) as ledger:
        for one in (row(1), row(2, tokens_in=10**30), row(3)):
            ledger.close(one)
        await until(lambda: ledger.state().moved == 3)
        assert ledger.state().refused == 1
    assert await asyncio.to_thread(ids, postgres_url) == ["req_000001", "req_000003"]


async def test_two_workers_that_start_together_make_one_table(postgres_url: str, tmp_path: Path) -> None:
    parts = {"store_url": postgres_url}
    async with started(tmp_path, **parts) as one, started(tmp_path, **parts) as other:
        one.close(row(1))
        other.close(row(2))
    assert await asyncio.to_thread(ids, postgres_url) == ["req_000001", "req_000002"]


async def test_rows_outlive_a_postgresql_that_stops_and_comes_back(
    own_postgres: OwnPostgres, tmp_path: Path
) -> None:
    config = replace(QUICK, retry_s=0.1, segment_bytes=50_000)
    async with started(tmp_path, config, store_url=own_postgres.url) as ledger:
        for number in range(2000):
            ledger.open(opening(number))
            ledger.close(row(number))
            if number == 500:
                await until(lambda: ledger.state().moved > 0)
                await asyncio.to_thread(own_postgres.stop)
            if number == 1500:
                await until(lambda: ledger.state().store_away_s > 0)
                assert len(list((tmp_path / "ledger").glob("*/*.wal"))) > 5  # they wait in files
                await asyncio.to_thread(own_postgres.start)
        await until(lambda: ledger.state().moved >= 2000)
        assert ledger.state().held == 0
    found = await asyncio.to_thread(sums, own_postgres.url)
    total = 2000 * 1999 // 2
    assert found == [2000, 20_000 + total, 2_000_000 + total]


async def test_a_gateway_that_starts_before_its_postgresql_waits_for_it(tmp_path: Path) -> None:
    missing = "postgresql://ridgeline@127.0.0.1:1/ridgeline"
    async with started(tmp_path, AWAY, store_url=missing) as ledger:
        ledger.open(opening(1))
        ledger.close(row(1))
        await until(lambda: ledger.state().store_away_s > 0)
        assert "PostgreSQL" in ledger.state().trouble
        assert "ridgeline@" not in ledger.state().trouble


def sums(url: str) -> list[int]:
    store = postgres_ledger(url)
    try:
        found = store.query("SELECT count(*), sum(tokens_in), sum(cost_pusd) FROM ridgeline_ledger")
        return [int(value) for value in found[0]]
    finally:
        store.close()


def ids(url: str) -> list[Any]:
    store = postgres_ledger(url)
    try:
        return [found[0] for found in store.query("SELECT request_id FROM ridgeline_ledger ORDER BY 1")]
    finally:
        store.close()
