"""What SQLite and PostgreSQL do alike: transactions, bulk inserts, and telling what went wrong."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.storage.database import BlockingDatabase, Row, Work, statement
from ridgeline.storage.errors import StorageError, StorageUnavailable, ValuesRefused
from ridgeline.storage.postgres_session import PostgresSession
from ridgeline.storage.sqlite_file import SqliteFile
from tests.gateway.services import OwnPostgres
from tests.storage.conftest import Place

TABLE = (("CREATE TABLE things (id TEXT PRIMARY KEY, size BIGINT NOT NULL)",),)


def things(place: Place) -> BlockingDatabase:
    database = place.open()
    database.migrate("things", TABLE)
    return database


def test_a_transaction_that_raises_leaves_nothing(place: Place) -> None:
    def half_done() -> Work[None]:
        yield "INSERT INTO things VALUES (?, ?)", ("a", 1)
        raise KeyError("stopped")

    database = things(place)
    with pytest.raises(KeyError):
        database.write(half_done())
    assert database.ask("SELECT * FROM things") == []
    database.write(statement("INSERT INTO things VALUES (?, ?)", "a", 2))
    assert database.ask("SELECT * FROM things") == [("a", 2)]


async def test_a_reader_sees_one_view_while_another_writes(place: Place) -> None:
    reader, other = place.open_async(), ThreadPoolExecutor(1)
    writer = other.submit(things, place).result()

    def add(id: str) -> None:
        work = statement("INSERT INTO things VALUES (?, ?)", id, 1)
        other.submit(writer.write, work).result()

    def twice() -> Work[tuple[list[Row], list[Row]]]:
        before = yield "SELECT id FROM things", ()
        add("b")
        return before, (yield "SELECT id FROM things", ())

    add("a")
    assert await reader.read(twice()) == ([("a",)], [("a",)])
    assert await reader.ask("SELECT id FROM things ORDER BY id") == [("a",), ("b",)]
    await reader.close()
    other.submit(writer.close).result()
    other.shutdown()


def test_records_that_are_known_are_not_added_again(place: Place) -> None:
    database = things(place)
    assert database.insert_new("things", "id", ("id", "size"), [("a", 1), ("b", 2)]) == 2
    assert database.insert_new("things", "id", ("id", "size"), [("b", 9), ("c", 3)]) == 1
    assert database.ask("SELECT * FROM things ORDER BY id") == [("a", 1), ("b", 2), ("c", 3)]


def test_a_value_that_is_refused_takes_its_whole_batch_and_harms_no_later_one(place: Place) -> None:
    database = things(place)
    with pytest.raises(ValuesRefused):
        database.insert_new("things", "id", ("id", "size"), [("a", 1), ("b", 10**30)])
    assert database.ask("SELECT * FROM things") == []
    assert database.insert_new("things", "id", ("id", "size"), [("a", 1)]) == 1


def test_a_postgresql_that_comes_back_is_used_again() -> None:
    own = OwnPostgres()
    try:
        session = PostgresSession(own.url, 60.0)
        session.migrate("things", TABLE)
        own.stop()
        with pytest.raises(StorageUnavailable, match="PostgreSQL"):
            session.ask("SELECT 1")
        own.start()
        assert session.insert_new("things", "id", ("id", "size"), [("a", 1)]) == 1
        session.close()
    finally:
        own.remove()


@pytest.mark.parametrize(
    "url", ["postgresql://me:hunter2@127.0.0.1:port/x", "postgresql://me:hunter2@[::1/x"]
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    session = PostgresSession(url, 5.0)
    with pytest.raises(StorageError, match="URL") as refused:
        session.ask("SELECT 1")
    session.close()
    assert not isinstance(refused.value, StorageUnavailable)
    assert "hunter2" not in str(refused.value)


def test_a_locked_file_is_unavailable_and_then_used_again(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    database = SqliteFile(path, 0.05)
    database.migrate("things", TABLE)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable, match="locked"):
        database.insert_new("things", "id", ("id", "size"), [("a", 1)])
    holder.execute("ROLLBACK")
    holder.close()
    assert database.insert_new("things", "id", ("id", "size"), [("a", 1)]) == 1
    database.close()


def test_a_file_opened_to_read_is_neither_made_nor_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with pytest.raises(StorageUnavailable):
        SqliteFile(path, 1.0, read_only=True).ask("SELECT 1")
    assert not path.exists()
    database = SqliteFile(path, 1.0)
    database.migrate("things", TABLE)
    reader = SqliteFile(path, 1.0, read_only=True)
    with pytest.raises(StorageUnavailable, match="readonly"):
        reader.write(statement("INSERT INTO things VALUES (?, ?)", "a", 1))
    assert reader.ask("SELECT * FROM things") == []
    reader.close()
    database.close()
