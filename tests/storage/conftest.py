"""A database of either kind; the tests here say the same of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.storage.database import BlockingDatabase, Database
from ridgeline.storage.postgres import PostgresDatabase
from ridgeline.storage.postgres_session import PostgresSession
from ridgeline.storage.sqlite import SqliteDatabase
from ridgeline.storage.sqlite_file import SqliteFile
from tests.gateway.services import _postgres_server, postgres_url

__all__ = ["_postgres_server", "postgres_url"]

TIMEOUT_S = 60.0


class Place:
    """Opens one database, as often as a test wants, for a thread or for an event loop."""

    def __init__(self, where: Path | str) -> None:
        self._where = where
        self._opened: list[BlockingDatabase] = []

    def open(self) -> BlockingDatabase:
        made: BlockingDatabase
        if isinstance(self._where, Path):
            made = SqliteFile(self._where, TIMEOUT_S)
        else:
            made = PostgresSession(self._where, TIMEOUT_S)
        self._opened.append(made)
        return made

    def open_async(self) -> Database:
        if isinstance(self._where, Path):
            return SqliteDatabase(self._where, TIMEOUT_S)
        return PostgresDatabase(self._where, 2, TIMEOUT_S)

    def close(self) -> None:
        for one in self._opened:
            one.close()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    is_file = request.param == "sqlite"
    place = Place(tmp_path / "test.sqlite" if is_file else request.getfixturevalue("postgres_url"))
    yield place
    place.close()
