"""Which store an address names: a SQLite file, PostgreSQL or Qdrant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.options import OptionError
from ridgeline.storage.errors import StorageError

if TYPE_CHECKING:  # numpy: only where a store is opened
    from ridgeline.retrieval.stores.protocol import Store

KINDS = "sqlite, postgresql://… or http(s)://… of a Qdrant"


def check_address(address: str, where: str) -> None:
    if address != "sqlite" and not address.startswith(
        ("postgresql://", "postgres://", "http://", "https://")
    ):
        raise OptionError(f"{where}: {address[:64]!r} names no store; give {KINDS}")


def store_of(address: str, file: Path, timeout_s: float, key: str | None = None) -> Store:
    """file: of SQLite. key: the API key of Qdrant."""
    check_address(address, "the address of the store")
    if address == "sqlite":
        from ridgeline.retrieval.stores.sqlite import SqliteStore

        return SqliteStore(file, timeout_s)
    if address.startswith("http"):
        from ridgeline.retrieval.stores.qdrant import QdrantStore

        return QdrantStore(address, key)
    try:
        from ridgeline.retrieval.stores.postgres import PostgresStore
    except StorageError as error:
        raise OptionError(f"vector stores in PostgreSQL: {error}") from None
    return PostgresStore(address)
