"""The tables of the catalog, by version. A released step is never edited: add the next."""

from __future__ import annotations

from ridgeline.storage.database import Step

COMPONENT = "retrieval_catalog"
VERSIONS: tuple[Step, ...] = (
    (
        """CREATE TABLE vector_stores (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, name TEXT NOT NULL, description TEXT,
    metadata TEXT NOT NULL, created_at INTEGER NOT NULL, active_at INTEGER NOT NULL, expires_days INTEGER,
    expired INTEGER NOT NULL DEFAULT 0)""",
        """CREATE TABLE store_files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, store_id TEXT NOT NULL, file_id TEXT NOT NULL,
    filename TEXT NOT NULL, created_at INTEGER NOT NULL, status TEXT NOT NULL, attributes TEXT NOT NULL,
    strategy TEXT NOT NULL, batch_id TEXT, usage_bytes INTEGER NOT NULL DEFAULT 0,
    chunks INTEGER NOT NULL DEFAULT 0, failure TEXT, UNIQUE (store_id, file_id))""",
        "CREATE INDEX store_files_by_status ON store_files (status, number)",
        "CREATE INDEX store_files_by_batch ON store_files (batch_id, number)",
        """CREATE TABLE file_batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, store_id TEXT NOT NULL,
    created_at INTEGER NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0)""",
        """CREATE TABLE embedded_parts (
    file_number INTEGER NOT NULL, store_id TEXT NOT NULL, part INTEGER NOT NULL, vectors BLOB NOT NULL,
    PRIMARY KEY (file_number, part))""",
    ),
    (
        "ALTER TABLE vector_stores ADD COLUMN dimensions INTEGER",
        # Vectors say what they were made of. Those that do not are made again.
        "DROP TABLE embedded_parts",
        """CREATE TABLE embedded_parts (
    file_number INTEGER NOT NULL, store_id TEXT NOT NULL, part INTEGER NOT NULL, origin TEXT NOT NULL,
    vectors BLOB NOT NULL, PRIMARY KEY (file_number, part))""",
    ),
)
