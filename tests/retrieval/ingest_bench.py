"""Ingest in one process, for its tests: a catalog, a SQLite store and a runner over a folder of files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ridgeline.retrieval.chunking.strategy import Strategy
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.records import FileBatch, StoreFile, VectorStoreRow
from ridgeline.retrieval.ingest.runner import AT_ONCE, IngestRunner
from ridgeline.retrieval.stores.sqlite import SqliteStore
from ridgeline.retrieval.types import Namespace
from ridgeline.storage.sqlite import SqliteDatabase
from tests.patience import PATIENCE_S
from tests.retrieval.word_embedder import WordEmbedder


class Bench:
    def __init__(self, folder: Path, at_once: int) -> None:
        self.folder = folder
        self.catalog = Catalog(SqliteDatabase(folder / "catalog.sqlite", 60.0), lambda: self.time)
        self.store = SqliteStore(folder / "chunks.sqlite", 60.0)
        self.embedder = WordEmbedder()
        self.runner = IngestRunner(
            self.catalog, self.store, lambda: self.embedder, self._source, at_once=at_once
        )
        self.namespace = Namespace("", "vs")
        self.time = 1000.0

    async def _source(self, file_id: str) -> Path:
        path = self.folder / file_id
        if not path.exists():
            raise FileNotFoundError(path)
        return path

    def file(
        self, name: str, content: str | bytes, batch: str | None = None, store_id: str = "vs"
    ) -> StoreFile:
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        strategy = Strategy("tokens", 20, 10)
        return StoreFile(
            store_id=store_id, file_id=name, filename=name, created_at=1, strategy=strategy, batch_id=batch
        )

    async def take_up(self, *files: StoreFile, batch: FileBatch | None = None) -> list[StoreFile]:
        added = await self.catalog.add_files(files, batch)
        for file in added:
            self.runner.take_up(file)
        return added

    async def settled(self, *files: StoreFile) -> list[StoreFile]:
        """The files when their jobs have ended, however."""
        runner, numbers = self.runner, {file.number for file in files}
        async with asyncio.timeout(PATIENCE_S):
            while numbers & (runner._jobs.keys() | {file.number for file in runner._waiting}):
                await asyncio.sleep(0.002)
        found = [await self.catalog.file(file.store_id, file.file_id) for file in files]
        return [file for file in found if file is not None]


@asynccontextmanager
async def opened_bench(folder: Path, at_once: int = AT_ONCE) -> AsyncIterator[Bench]:
    made = Bench(folder, at_once)
    await made.catalog.open()
    await made.store.open()
    for id in ("vs", "other"):
        await made.catalog.add_store(VectorStoreRow(id=id, name="", created_at=1, active_at=1000))
    await made.runner.start()
    yield made
    await made.runner.stop()
    await made.catalog.close()
    await made.store.close()
