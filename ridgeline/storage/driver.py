"""asyncpg, or a StorageError that says how to install it."""

from __future__ import annotations

from ridgeline.storage.errors import StorageError

try:
    import asyncpg
except ModuleNotFoundError as error:
    raise StorageError("PostgreSQL needs asyncpg: pip install 'ridgeline[gateway]'") from error

__all__ = ["asyncpg"]
