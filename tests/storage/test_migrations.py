"""Migrations: each step once, from any earlier version, by any number of processes at once."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.storage.database import Step, Work
from ridgeline.storage.errors import StorageError
from ridgeline.storage.migrations import table_with
from tests.storage.conftest import Place

FIRST: Step = ("CREATE TABLE things (id TEXT PRIMARY KEY)", "INSERT INTO things (id) VALUES ('a')")
SECOND: Step = ("ALTER TABLE things ADD COLUMN size BIGINT NOT NULL DEFAULT 7",)


def test_each_step_runs_once(place: Place) -> None:
    database = place.open()
    database.migrate("things", (FIRST,))
    database.migrate("things", (FIRST,))
    later = place.open()
    later.migrate("things", (FIRST, SECOND))
    later.migrate("things", (FIRST, SECOND))
    assert later.ask("SELECT id, size FROM things") == [("a", 7)]


def test_components_have_versions_of_their_own(place: Place) -> None:
    database = place.open()
    database.migrate("things", (FIRST, SECOND))
    database.migrate("others", (("CREATE TABLE others (id TEXT PRIMARY KEY)",),))
    versions = database.ask("SELECT component, version FROM ridgeline_schema ORDER BY component")
    assert versions == [("others", 1), ("things", 2)]


def test_a_step_that_fails_leaves_the_version_before_it(place: Place) -> None:
    def broken() -> Work[None]:
        yield "ALTER TABLE things ADD COLUMN size BIGINT", ()
        raise KeyError("stopped")

    database = place.open()
    database.migrate("things", (FIRST,))
    with pytest.raises(KeyError):
        database.migrate("things", (FIRST, broken))
    assert database.ask("SELECT * FROM things") == [("a",)]
    database.migrate("things", (FIRST, SECOND))
    assert database.ask("SELECT * FROM things") == [("a", 7)]


def test_tables_of_a_newer_version_are_refused(place: Place) -> None:
    place.open().migrate("things", (FIRST, SECOND))
    with pytest.raises(StorageError, match="have version 2, this ridgeline knows up to 1"):
        place.open().migrate("things", (FIRST,))


def test_a_table_without_a_version_gets_the_columns_it_lacks(place: Place) -> None:
    database = place.open()
    columns = {"id": "TEXT PRIMARY KEY", "size": "BIGINT NOT NULL DEFAULT 7", "name": "TEXT"}
    database.migrate("old", (("CREATE TABLE things (id TEXT PRIMARY KEY, name TEXT)",),))
    step = table_with(database.dialect, "things", columns, ("CREATE INDEX things_size ON things (size)",))
    database.migrate("things", (step,))
    assert database.insert_new("things", "id", ("id", "name"), [("a", "n")]) == 1
    assert database.ask("SELECT id, size, name FROM things") == [("a", 7, "n")]


async def test_processes_that_start_at_once_migrate_once(place: Place) -> None:
    databases = [place.open_async() for _ in range(6)]
    await asyncio.gather(*(one.migrate("things", (FIRST, SECOND)) for one in databases))
    assert await databases[0].ask("SELECT id, size FROM things") == [("a", 7)]
    await asyncio.gather(*(one.close() for one in databases))
