"""The vector stores of a server without its models: what removing and expiring do to the store of chunks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from ridgeline.retrieval.ingest.records import StoreFile, VectorStoreRow
from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec
from ridgeline.server.config import ServerConfig
from ridgeline.server.records.state import StateStore
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vector_stores.service import VectorStores, namespace_of


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[VectorStores]:
    with contextlib.closing(StateStore(tmp_path)) as state:
        made = await VectorStores(ServedModels(ServerConfig(), [], state)).opened()
        for id in ("vs_a", "vs_b"):
            await made.catalog.add_store(VectorStoreRow(id=id, name="", created_at=1, active_at=1))
            await made.store.create(namespace_of(id), NamespaceSpec(4, "model"))
        yield made
        await made.stop()


async def with_a_file(stores: VectorStores, store_id: str) -> StoreFile:
    """A file that is searchable."""
    row = StoreFile(store_id=store_id, file_id="file-1", filename="a.txt", created_at=1)
    (file,) = await stores.catalog.add_files([row])
    chunk = Chunk("file-1:0", "file-1", 0, 0, 3, "tea", vector=np.ones(4, np.float32))
    await stores.store.put(namespace_of(store_id), Document("file-1", "a.txt", "tea"), [chunk])
    assert await stores.catalog.complete(file, 1, 1)
    return file


async def test_removing_a_file_counts_the_rows_of_no_store(
    stores: VectorStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await with_a_file(stores, "vs_a")
    await with_a_file(stores, "vs_b")

    async def counted(*asked: object) -> None:
        raise AssertionError("counts rows, of every store")

    with monkeypatch.context() as patched:
        for name in ("namespaces", "describe"):
            patched.setattr(stores.store, name, counted)
        await stores.forget_file(file)
        await stores.store.drop(Namespace("", "vs_a"))
        await stores.forget_file(file)  # no file of the store is done
    left = await stores.store.namespaces("")
    assert [(one.namespace.name, one.documents) for one in left] == [("vs_b", 1)]
