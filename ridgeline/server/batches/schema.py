"""The tables of files and batches, by version. A released step is never edited: add the next.

Servers before version 1 made the same tables without a version; the usage columns came later.
"""

from __future__ import annotations

from ridgeline.storage.database import Step
from ridgeline.storage.migrations import table_with

_COUNT = "INTEGER NOT NULL DEFAULT 0"
_BATCH_COLUMNS = {
    "number": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "id": "TEXT UNIQUE NOT NULL",
    "status": "TEXT NOT NULL",
    "input_file_id": "TEXT NOT NULL",
    "expires_at": "INTEGER NOT NULL",
    "ending": "TEXT",
    "output_seconds": "INTEGER NOT NULL",
    "completed": _COUNT,
    "failed": _COUNT,
    "body": "BLOB NOT NULL",
    "input_tokens": _COUNT,
    "cached_tokens": _COUNT,
    "output_tokens": _COUNT,
    "reasoning_tokens": _COUNT,
}
VERSIONS: tuple[Step, ...] = (
    (
        """CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, body BLOB NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS batch_lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    custom_id TEXT NOT NULL, outcome INTEGER NOT NULL DEFAULT 0, answer BLOB,
    PRIMARY KEY (batch_id, number))""",
    ),
    table_with("sqlite", "batches", _BATCH_COLUMNS),
)
