"""Every closed row reaches the table once, whatever the store and the disk do."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ridgeline.gateway.accounting.config import LedgerConfig
from ridgeline.gateway.accounting.errors import StoreAway
from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store.table import LedgerStore
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.errors import Unavailable
from ridgeline.options import OptionError
from ridgeline.storage.sqlite_file import SqliteFile
from tests.gateway.accounting.books import (
    AWAY,
    QUICK,
    files_of_at_most,
    journal_folders,
    opening,
    row,
    started,
    stored,
)
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S


async def test_a_closed_row_is_in_the_table_with_all_its_fields(tmp_path: Path) -> None:
    async with started(tmp_path) as ledger:
        ledger.open(opening(1))
        ledger.close(row(1, outcome="client_gone", similarity=0.97, ttft_ms=12.5, route='{"why": "ü"}'))
        await until(lambda: ledger.state().moved == 1)
        assert ledger.state().written == 1
    columns = "request_id, outcome, similarity, ttft_ms, route, tokens_in, cost_pusd, stream"
    assert stored(tmp_path, columns) == [
        ("req_000001", "client_gone", 0.97, 12.5, '{"why": "ü"}', 11, 1001, 0)
    ]


async def test_a_stopped_ledger_leaves_no_files_behind(tmp_path: Path) -> None:
    ledger = Ledger(QUICK, tmp_path, "w0")
    await ledger.start()
    for number in range(1000):
        ledger.close(row(number))
    assert await ledger.stop()
    assert len(stored(tmp_path)) == 1000
    assert journal_folders(tmp_path) == []


@pytest.mark.parametrize("fsync", ["off", "interval", "always"])
async def test_segments_end_at_their_size_and_go_when_their_rows_are_stored(
    tmp_path: Path, fsync: Literal["off", "interval", "always"]
) -> None:
    config = replace(QUICK, segment_bytes=10_000, fsync=fsync)
    async with started(tmp_path, config) as ledger:
        ledger.open(opening(999_999))  # under way all the time: it must not hold old segments
        for number in range(500):
            ledger.close(row(number))
        await until(lambda: ledger.state().moved == 500)
        (folder,) = journal_folders(tmp_path)
        await until(lambda: len(list(folder.glob("*.wal"))) == 1)
        (left,) = folder.glob("*.wal")
        assert left.name > "0000000020.wal"
        assert b"req_999999" in left.read_bytes()  # and must not be forgotten with them
        ledger.close(row(999_999))
    assert len(stored(tmp_path)) == 501


async def test_rows_outlive_a_store_that_fails_before_or_after_its_commit(tmp_path: Path) -> None:
    class Unsteady(LedgerStore):
        def insert(self, rows: Sequence[LedgerRow]) -> int:
            fate = chance.random()
            if fate < 0.3:
                raise StoreAway("cut off before")
            count = super().insert(rows)
            if fate < 0.6:
                raise StoreAway("cut off after")  # committed, but the answer was lost
            return count

    chance = random.Random(7)
    store = Unsteady(SqliteFile(tmp_path / "ledger.sqlite", 10.0))
    async with started(tmp_path, store=store) as ledger:
        for number in range(200):
            ledger.open(opening(number))
            ledger.close(row(number))
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: ledger.state().moved == 200)
    assert stored(tmp_path) == [f"req_{number:06d}" for number in range(200)]


async def test_rows_wait_while_the_sqlite_file_is_locked(tmp_path: Path) -> None:
    config = replace(QUICK, store_timeout_s=0.05)
    async with started(tmp_path, config) as ledger:
        ledger.close(row(0))
        await until(lambda: ledger.state().moved == 1)
        holder = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        for number in range(1, 100):
            ledger.close(row(number))
        await until(lambda: "locked" in ledger.state().trouble)
        assert ledger.state().store_away_s > 0
        holder.execute("ROLLBACK")
        holder.close()
        await until(lambda: ledger.state().moved == 100)
        await until(lambda: ledger.state().trouble == "")
    assert len(stored(tmp_path)) == 100


async def test_a_store_that_is_away_holds_nothing_in_memory(tmp_path: Path) -> None:
    class Away(LedgerStore):
        def insert(self, rows: Sequence[LedgerRow]) -> int:
            raise StoreAway("away")

    ledger = Ledger(AWAY, tmp_path, "w0", store=Away(SqliteFile(tmp_path / "ledger.sqlite", 10.0)))
    await ledger.start()
    for number in range(3000):
        ledger.open(opening(number))
        ledger.close(row(number))
    await until(lambda: ledger.state().store_away_s > 0)
    mover, journal = ledger._mover, ledger._journal
    assert len(mover._own.batch) < 1000  # what one read of the file gives
    assert not ledger._held
    assert journal.unfinished == 0
    assert not await ledger.stop()
    async with started(tmp_path) as following:
        await until(lambda: following.state().moved_for_dead == 3000)
    assert len(stored(tmp_path)) == 3000


async def test_a_row_that_the_store_refuses_is_set_aside_and_stops_no_other(tmp_path: Path) -> None:
    async with started(tmp_path) as ledger:
        ledger.close(row(1))
        ledger.close(row(2, tokens_in=10**30))
        ledger.close(row(3, model_asked="half a pair \ud800 and \0"))
        await until(lambda: ledger.state().moved == 3)
        assert ledger.state().refused == 1
    assert stored(tmp_path) == ["req_000001", "req_000003"]
    assert b"req_000002" in (tmp_path / "ledger" / "refused.jsonl").read_bytes()


async def test_a_very_long_text_is_cut_and_the_row_kept(tmp_path: Path) -> None:
    async with started(tmp_path) as ledger:
        ledger.close(row(1, model_asked="x" * 1_000_000, route="y" * 10))
        await until(lambda: ledger.state().moved == 1)
    ((asked, route),) = stored(tmp_path, "model_asked, route")
    assert len(asked) == 4096
    assert route == "y" * 10


async def test_files_of_a_dead_worker_are_taken_over_and_its_open_requests_booked_as_lost(
    tmp_path: Path,
) -> None:
    dead = Ledger(QUICK, tmp_path, "w0", store=Gone(SqliteFile(tmp_path / "x.sqlite", 10.0)))
    await dead.start()
    for number in range(5):
        dead.open(opening(number))
    dead.close(row(0))
    dead.close(row(1))
    dead.open(opening(2, upstream="second"))  # a fallback: the later upstream is asked
    die(dead)

    asked = []

    async def usage_of(upstream: str, request_id: str, at_ms: int) -> Usage | None:
        assert at_ms == opening(int(request_id.removeprefix("req_"))).at_ms
        asked.append((upstream, request_id))
        if request_id == "req_000003":
            return None
        if request_id == "req_000004" and asked.count((upstream, request_id)) < 2:
            raise ConnectionError("still at it")
        return Usage(tokens_in=100, tokens_cached=40, tokens_out=9, source="reported")

    def cost_of(model: str, upstream: str, upstream_model: str, usage: Usage) -> tuple[int, str]:
        return usage.tokens_in * 2 + usage.tokens_out * 3, "config"

    config = replace(QUICK, ask_lost_s=PATIENCE_S)
    async with started(tmp_path, config, usage_of=usage_of, cost_of=cost_of) as ledger:
        await until(lambda: ledger.state().taken_over == 1)
    columns = "request_id, outcome, tokens_in, tokens_cached, tokens_out, usage_source, cost_pusd"
    assert stored(tmp_path, columns) == [
        ("req_000000", "ok", 10, 0, 3, "reported", 1000),
        ("req_000001", "ok", 11, 0, 3, "reported", 1001),
        ("req_000002", "lost", 100, 40, 9, "reported", 227),
        ("req_000003", "lost", 7, 0, 0, "estimated", 14),
        ("req_000004", "lost", 100, 40, 9, "reported", 227),
    ]
    assert ("second", "req_000002") in asked
    assert not any(request_id == "req_000000" for _, request_id in asked)
    assert journal_folders(tmp_path) == []


async def test_a_lost_request_is_estimated_by_its_input_and_by_the_time_its_gateway_lived(
    tmp_path: Path,
) -> None:
    dead = Ledger(QUICK, tmp_path, "w0", store=Gone(SqliteFile(tmp_path / "x.sqlite", 10.0)))
    await dead.start()
    now_ms = int(time.time() * 1000)
    dead.open(opening(1, at_ms=now_ms - 3000, tokens_in_estimate=50, answers=2))
    dead.open(opening(2, at_ms=now_ms - 3000, tokens_in_estimate=60, answers=1, output_limit=40))
    dead.open(opening(3, at_ms=now_ms - 3000, tokens_in_estimate=70))  # of an endpoint without output
    die(dead)
    async with started(tmp_path) as ledger:
        await until(lambda: ledger.state().taken_over == 1)
    rows = stored(tmp_path, "tokens_in, tokens_out, usage_source")
    assert [(tokens_in, source) for tokens_in, _, source in rows] == [
        (50, "estimated"),
        (60, "estimated"),
        (70, "estimated"),
    ]
    assert rows[0][1] >= 2 * 3 * 100  # two answers of 100 tokens a second for at least 3 s
    assert [tokens_out for _, tokens_out, _ in rows[1:]] == [40, 0]


async def test_a_living_worker_s_files_are_left_alone(tmp_path: Path) -> None:
    living = Ledger(AWAY, tmp_path, "w0", store=Gone(SqliteFile(tmp_path / "x.sqlite", 10.0)))
    await living.start()
    living.open(opening(1))
    async with started(tmp_path) as ledger:
        ledger.close(row(2))
        await until(lambda: ledger.state().moved == 1)
        await asyncio.sleep(0.2)  # several looks for files of the dead
        assert ledger.state().taken_over == 0
    assert stored(tmp_path) == ["req_000002"]
    living.close(row(1))
    await living.stop()


async def test_files_that_may_grow_no_more_refuse_new_requests_and_book_the_running(tmp_path: Path) -> None:
    config = LedgerConfig(flush_ms=10, max_bytes=20_000, segment_bytes=5_000, stop_s=0.1)
    ledger = Ledger(config, tmp_path, "w0", store=Gone(SqliteFile(tmp_path / "x.sqlite", 10.0)))
    await ledger.start()
    admitted = 0
    while ledger.state().waiting_bytes <= 20_000:
        ledger.open(opening(admitted))
        admitted += 1
    with pytest.raises(Unavailable) as refused:
        ledger.open(opening(admitted))
    assert refused.value.code == "ledger_unavailable"
    for number in range(admitted):
        ledger.close(row(number))
    await ledger.stop()
    async with started(tmp_path) as following:
        await until(lambda: following.state().taken_over == 1)
    assert stored(tmp_path, "outcome") == ["ok"] * admitted


@pytest.mark.parametrize("when_full", ["refuse", "serve"])
async def test_a_full_disk_is_said_and_rows_go_straight_to_the_store(
    tmp_path: Path, when_full: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(QUICK, flush_ms=20, when_full=when_full)  # type: ignore[arg-type]
    async with started(tmp_path, config) as ledger:
        (folder,) = journal_folders(tmp_path)
        ledger.open(opening(1))
        # The limit falls into the middle of a record: a part of it is written.
        with files_of_at_most(os.path.getsize(folder / "0000000001.wal") + 100):
            if when_full == "refuse":
                with pytest.raises(Unavailable):
                    ledger.open(opening(2))
            else:
                ledger.open(opening(2))
            ledger.close(row(1))
            ledger.close(row(2, status=503, outcome="invalid"))
            assert ledger.state().held == 2
        ledger.open(opening(3))
        ledger.close(row(3))
        await until(lambda: ledger.state().moved == 3)
        assert ledger.state().damaged <= 1  # the torn record, no neighbour of it
    assert stored(tmp_path, "request_id, outcome") == [
        ("req_000001", "ok"),
        ("req_000002", "invalid"),
        ("req_000003", "ok"),
    ]
    assert "could not be written to the ledger's file" in caplog.text


async def test_rows_beyond_what_memory_may_hold_are_counted_and_written_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(QUICK, flush_ms=60_000, when_full="serve", memory_rows=2)
    async with started(tmp_path, config) as ledger:
        with files_of_at_most(0):
            for number in range(5):
                ledger.close(row(number))
        assert ledger.state().dropped == 3
    assert len(stored(tmp_path)) == 2
    assert "req_000004" in caplog.text


async def test_old_rows_are_removed_in_batches_and_young_ones_kept(tmp_path: Path) -> None:
    import time

    now = int(time.time() * 1000)
    async with started(tmp_path) as ledger:
        for number in range(2500):
            ledger.close(row(number, at_ms=now - 8 * 86_400_000))
        ledger.close(row(9000, at_ms=now - 6 * 86_400_000))
        await until(lambda: ledger.state().moved == 2501)
    async with started(tmp_path, replace(QUICK, keep_days=7)):
        await until(lambda: stored(tmp_path) == ["req_009000"])


@pytest.mark.parametrize(("name", "value"), [("flush_ms", 0), ("max_bytes", 100), ("keep_days", -1)])
def test_a_setting_that_cannot_work_is_refused_by_its_name(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=rf"\[ledger\] {name} must be at least"):
        LedgerConfig(**{name: value})


async def test_what_was_spent_counts_what_a_dead_worker_had_left(tmp_path: Path) -> None:
    dead = Ledger(QUICK, tmp_path, "w0", store=Gone(SqliteFile(tmp_path / "x.sqlite", 10.0)))
    await dead.start()
    for number in range(3):
        dead.close(row(number, key_id="key_a", cost_pusd=5))
    die(dead)
    async with started(tmp_path) as ledger:
        assert await ledger.spent("key", "key_a", 0) == 15
        assert await ledger.spent("key", "key_b", 0) == 0


class Gone(LedgerStore):
    """A store that is never there: everything stays in the files."""

    def insert(self, rows: Sequence[LedgerRow]) -> int:
        raise StoreAway("away")


def die(ledger: Ledger) -> None:
    """As a killed process leaves it: the lock is free, the thread writes no more."""
    ledger._mover._stopping = True
    ledger._mover._wake.set()
    ledger._mover._thread.join()
