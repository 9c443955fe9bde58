"""A process that ingests the files of a folder and ends when all are done: `ingest_process FOLDER PAUSE_S`.

Run again after it was killed, it goes on from its journal. Used by the tests of crashes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ridgeline.retrieval.chunking.strategy import Strategy
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.records import Page, StoreFile, VectorStoreRow
from ridgeline.retrieval.ingest.runner import IngestRunner
from ridgeline.retrieval.stores.sqlite import SqliteStore
from ridgeline.storage.sqlite import SqliteDatabase
from tests.retrieval.word_embedder import WordEmbedder

STORE_ID = "vs_crash"
STRATEGY = Strategy("tokens", 20, 10)


def opened(folder: Path) -> tuple[Catalog, SqliteStore]:
    catalog = Catalog(SqliteDatabase(folder / "catalog.sqlite", 60.0))
    return catalog, SqliteStore(folder / "chunks.sqlite", 60.0)


async def ingest(folder: Path, pause_s: float) -> None:
    catalog, store = opened(folder)
    await catalog.open()
    await store.open()
    embedder = WordEmbedder(pause_s)

    async def source(file_id: str) -> Path:
        return folder / "files" / file_id

    runner = IngestRunner(catalog, store, lambda: embedder, source)
    if await catalog.store(STORE_ID) is None:
        files = [
            StoreFile(
                store_id=STORE_ID, file_id=path.name, filename=path.name, created_at=0, strategy=STRATEGY
            )
            for path in sorted((folder / "files").iterdir())
        ]
        await catalog.add_files(files)
        await catalog.add_store(VectorStoreRow(id=STORE_ID, name="", created_at=0, active_at=0))
    await runner.start()
    while (await catalog.counts(STORE_ID))[0].in_progress:
        await asyncio.sleep(0.01)
    await runner.stop()
    assert await catalog.files(STORE_ID, Page(limit=1))
    await catalog.close()
    await store.close()


if __name__ == "__main__":
    asyncio.run(ingest(Path(sys.argv[1]), float(sys.argv[2])))
