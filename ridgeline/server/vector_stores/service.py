"""VectorStores: the catalog, the store of chunks and the ingest of one server. Started with its engines.

The files are those of /v1/files. What is kept lies in the state directory: `retrieval/catalog.sqlite` and
`retrieval/chunks.sqlite`; with `retrieval_store` the chunks lie in another database. Opened at first use: a
server without vector stores keeps nothing open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from ridgeline.retrieval.errors import NamespaceNotFound, StoreUnavailable
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.ingest.records import FileCounts, StoreFile, VectorStoreRow
from ridgeline.server.batches.endpoints import Batches
from ridgeline.server.errors import ApiError, NotReady
from ridgeline.server.served_models import ServedModels
from ridgeline.storage.sqlite import SqliteDatabase

if TYPE_CHECKING:  # numpy: only for a server with vector stores
    from ridgeline.retrieval.ingest.runner import IngestRunner
    from ridgeline.retrieval.stores.protocol import Store
    from ridgeline.retrieval.types import Namespace
    from ridgeline.server.vector_stores.embedder import ServedEmbedder

log = logging.getLogger("ridgeline.server")

BUSY_S = 10.0  # longest wait for another process that holds the file
SWEEP_S = 30.0
TOUCH_S = 60  # activity is noted at most this often
POLL_S = 0.02  # between looks at the files in progress


class VectorStores:
    def __init__(self, served_models: ServedModels) -> None:
        if served_models.state is None:
            message = "this server keeps no vector stores: it has no state directory"
            raise ApiError(404, message, code="not_found")
        folder = served_models.state.folder / "retrieval"
        self._folder = folder
        self.served_models = served_models
        self._files = served_models.part(Batches).store
        self._opening = asyncio.Lock()
        self._is_open = False
        self._sweeping: asyncio.Task[None] | None = None
        self.catalog: Catalog
        self.store: Store
        self.runner: IngestRunner

    @classmethod
    async def of(cls, request: Request) -> VectorStores:
        return await ServedModels.of(request).part(cls).opened()

    async def opened(self) -> VectorStores:
        if not self._is_open:
            async with self._opening:
                if not self._is_open:
                    await self._open()
        return self

    async def _open(self) -> None:
        from ridgeline.retrieval.ingest.runner import IngestRunner

        self._folder.mkdir(mode=0o700, exist_ok=True)
        self.catalog = Catalog(SqliteDatabase(self._folder / "catalog.sqlite", BUSY_S))
        self.store = self._made_store()
        self.runner = IngestRunner(self.catalog, self.store, self._ready_embedder, self._source)
        await self.catalog.open()
        try:
            await self.store.open()
        except StoreUnavailable as error:
            await self.catalog.close()
            raise NotReady(f"the vector stores cannot be reached: {error}") from error
        if left := await self.runner.start():
            log.info("resuming the ingest of %d files", left)
        self._sweeping = asyncio.create_task(self._sweep())
        self._is_open = True

    def _made_store(self) -> Store:
        from ridgeline.retrieval.stores.choice import store_of

        config = self.served_models.config
        return store_of(
            config.retrieval_store, self._folder / "chunks.sqlite", BUSY_S, config.retrieval_store_key()
        )

    async def resume(self) -> None:
        """Take up what the last server left, if there is anything."""
        if (self._folder / "catalog.sqlite").exists():
            await self.opened()

    async def pause(self) -> None:
        """Begin no more work; searches are answered still."""
        if self._is_open:
            await self.runner.stop()

    async def stop(self) -> None:
        if self._is_open:
            if self._sweeping is not None:
                self._sweeping.cancel()
            await self.runner.stop()
            await self.catalog.close()
            await self.store.close()
            self._is_open = False

    # ── what handlers ask ────────────────────────────────────────────────────────────────────────────────

    def embedder(self) -> ServedEmbedder:
        from ridgeline.server.vector_stores.embedder import ServedEmbedder

        return ServedEmbedder.of(self.served_models)

    async def check_embedder(self, row: VectorStoreRow) -> None:
        """SpecMismatch where the store takes no vectors of the embedding model that is served."""
        from ridgeline.retrieval.ingest.embedder import checked_spec

        await checked_spec(self.store, namespace_of(row.id), self.embedder(), row.dimensions)

    async def found(self, store_id: str, param: str = "vector_store_id") -> VectorStoreRow:
        """The store, or 404; expired stores are there, and have no files."""
        row = await self.catalog.store(store_id)
        if row is None:
            message = f"{param}: there is no vector store {store_id[:64]!r}"
            raise ApiError(404, message, param=param, code="not_found")
        return row

    async def usable(self, store_id: str, param: str = "vector_store_id") -> VectorStoreRow:
        """The store, ready to be written or searched; its use is noted."""
        row = await self.found(store_id, param)
        if row.expired or (row.expires_at is not None and row.expires_at <= self.catalog.now()):
            message = f"{param}: the vector store {row.id!r} expired; create another"
            raise ApiError(409, message, param=param)
        if self.catalog.now() - row.active_at >= TOUCH_S:
            await self.catalog.touch(row.id)
        return row

    def take_up(self, files: list[StoreFile]) -> None:
        for file in files:
            self.runner.take_up(file)

    async def counts_after(self, store_id: str, wait_s: float) -> FileCounts:
        """The files by status, when none is in progress any more or `wait_s` have passed."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            counts, _ = await self.catalog.counts(store_id)
            if not counts.in_progress or asyncio.get_running_loop().time() >= deadline:
                return counts
            await asyncio.sleep(POLL_S)

    async def forget_file(self, file: StoreFile) -> None:
        await self.catalog.remove_file(file.store_id, file.file_id)
        await self.runner.forget(file.store_id, file.file_id)
        with contextlib.suppress(NamespaceNotFound):  # no file of the store is done
            await self.store.delete(namespace_of(file.store_id), file.file_id)

    async def forget_store(self, store_id: str) -> None:
        await self.catalog.remove_store(store_id)
        await self._drop(store_id)

    async def _drop(self, store_id: str) -> None:
        await self.runner.forget(store_id)
        await self.store.drop(namespace_of(store_id))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    def _ready_embedder(self) -> ServedEmbedder:
        try:
            return self.embedder()
        except ApiError as error:
            raise EmbedderUnavailable(str(error)) from error

    async def _source(self, file_id: str) -> Path:
        try:
            file = await self._files.file(file_id)
        except ApiError:
            raise FileNotFoundError(file_id) from None
        return self._files.path(file.id)

    async def _sweep(self) -> None:
        while True:
            try:
                for store_id in await self.catalog.expire():
                    await self._drop(store_id)
                    log.info("the vector store %s expired", store_id)
            except Exception:
                log.exception("removing expired vector stores failed; will be retried")
            await asyncio.sleep(SWEEP_S)


def namespace_of(store_id: str) -> Namespace:
    """Tenants are the gateway's: to a server, all clients are one."""
    from ridgeline.retrieval.types import Namespace

    return Namespace("", store_id)
