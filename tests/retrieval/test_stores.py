"""What every store does, by one suite."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from ridgeline.retrieval.errors import BadInput, NamespaceNotFound, SpecMismatch
from ridgeline.retrieval.filters import parse_filter
from ridgeline.retrieval.stores.postgres import PostgresStore
from ridgeline.retrieval.stores.protocol import Store
from ridgeline.retrieval.stores.qdrant import QdrantStore
from ridgeline.retrieval.stores.sqlite import SqliteStore
from ridgeline.retrieval.types import Attributes, Chunk, Document, Namespace, NamespaceSpec
from tests.retrieval.real_stores import postgres_url, qdrant_url
from tests.retrieval.test_filters import random_attributes, random_filter

SPEC = NamespaceSpec(8, "test-model")
MINE = Namespace("tenant-a", "store")
THEIRS = Namespace("tenant-b", "store")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_url() as url:
        yield url


@pytest_asyncio.fixture(params=["sqlite", "postgres", "qdrant"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store
    if request.param == "sqlite":
        made = SqliteStore(tmp_path / "retrieval.sqlite")
    elif request.param == "postgres":
        made = PostgresStore(request.getfixturevalue("postgres"))
    else:
        # Test processes share the server, and none the collections of another.
        made = QdrantStore(qdrant_url(), prefix=f"test{os.getpid()}")
    await made.open()
    for namespace in (MINE, THEIRS):  # the server is shared by the tests of this file
        await made.drop(namespace)
    yield made
    await made.close()


def document(
    id: str, texts: list[str], attributes: Attributes | None = None, seed: int = 0
) -> tuple[Document, list[Chunk]]:
    draw = np.random.default_rng([seed, *id.encode()])
    chunks, begin = [], 0
    for i, text in enumerate(texts):
        vector = draw.normal(size=SPEC.dimensions).astype(np.float32)
        chunks.append(Chunk(f"{id}:{i}", id, i, begin, begin + len(text), text, {}, vector))
        begin += len(text) + 1
    return Document(id, f"{id}.txt", " ".join(texts), attributes or {}), chunks


async def test_a_document_is_stored_with_its_chunks_and_replaced_whole(store: Store) -> None:
    await store.create(MINE, SPEC)
    first, chunks = document("one", ["Héllo wörld", "again"], {"year": 2024, "draft": False, "kind": "a"})
    await store.put(MINE, first, chunks)
    assert await store.document(MINE, "one") == first
    found = await store.chunks(MINE, "one", vectors=True)
    assert [(c.id, c.ordinal, c.begin, c.end, c.text) for c in found] == [
        (c.id, c.ordinal, c.begin, c.end, c.text) for c in chunks
    ]
    assert first.text[found[1].begin : found[1].end] == found[1].text
    assert found[0].attributes == {"year": 2024.0, "draft": False, "kind": "a"}
    for chunk, given in zip(found, chunks, strict=True):
        assert chunk.vector is not None
        assert given.vector is not None
        np.testing.assert_allclose(chunk.vector, given.vector / np.linalg.norm(given.vector), atol=1e-6)

    second, chunks = document("one", ["other"])
    await store.put(MINE, second, chunks)
    assert await store.document(MINE, "one") == second
    assert await store.spec(MINE) == SPEC
    info = await store.describe(MINE)
    assert (info.documents, info.chunks, info.spec) == (1, 1, SPEC)
    assert info.bytes == 5 + 5 + 4 * SPEC.dimensions
    assert await store.search_text(MINE, "wörld", None, 5) == []


async def test_search_finds_by_vector_and_by_text(store: Store) -> None:
    await store.create(MINE, SPEC)
    for name, texts in (("one", ["red apple", "green pear"]), ("two", ["red wine"])):
        await store.put(MINE, *document(name, texts))
    stored = (await store.fetch(MINE, ["one:1"], vectors=True))[0].vector
    assert stored is not None
    [found] = await store.search_vectors(MINE, stored[None], None, 2)
    assert found[0].chunk_id == "one:1"
    assert found[0].score == pytest.approx(1.0, abs=1e-5)
    assert len(found) == 2
    assert {one.chunk_id for one in await store.search_text(MINE, "RED things", None, 5)} == {
        "one:0",
        "two:0",
    }


async def test_filters_come_before_top_k(store: Store) -> None:
    await store.create(MINE, SPEC)
    for i in range(40):
        attributes = {"part": "rare" if i % 10 == 0 else "common", "i": i}
        await store.put(MINE, *document(f"d{i:02}", [f"word number{i}"], attributes))
    rare = parse_filter({"type": "eq", "key": "part", "value": "rare"})
    query = np.random.default_rng(5).normal(size=(3, SPEC.dimensions)).astype(np.float32)
    for found in await store.search_vectors(MINE, query, rare, 4):
        assert {one.chunk_id for one in found} == {"d00:0", "d10:0", "d20:0", "d30:0"}
    assert len(await store.search_text(MINE, "word", rare, 4)) == 4
    late = parse_filter({"type": "gte", "key": "i", "value": 38})
    assert {one.chunk_id for one in await store.search_text(MINE, "word", late, 9)} == {"d38:0", "d39:0"}


async def test_tenants_with_the_same_text_never_see_each_other(store: Store) -> None:
    for namespace in (MINE, THEIRS):
        await store.create(namespace, SPEC)
    made, chunks = document("doc", ["the shared secret text"])
    await store.put(THEIRS, made, chunks)
    assert chunks[0].vector is not None
    assert await store.search_vectors(MINE, chunks[0].vector[None], None, 5) == [[]]
    assert await store.search_text(MINE, "secret", None, 5) == []
    assert await store.fetch(MINE, ["doc:0"]) == []
    assert await store.document(MINE, "doc") is None
    assert not await store.delete(MINE, "doc")
    assert await store.drop(MINE)
    assert [one.chunk_id for one in await store.search_text(THEIRS, "secret", None, 5)] == ["doc:0"]
    assert [info.namespace for info in await store.namespaces("tenant-b")] == [THEIRS]
    assert await store.namespaces("tenant-a") == []


async def test_deleted_documents_and_changed_attributes_are_seen_at_once(store: Store) -> None:
    await store.create(MINE, SPEC)
    for name in ("one", "two"):
        await store.put(MINE, *document(name, ["same word"], {"kind": "old"}))
    old = parse_filter({"type": "eq", "key": "kind", "value": "old"})
    assert len(await store.search_text(MINE, "word", old, 5)) == 2
    assert await store.set_attributes(MINE, "one", {"kind": "new"})
    assert not await store.set_attributes(MINE, "none", {"kind": "new"})
    assert [one.chunk_id for one in await store.search_text(MINE, "word", old, 5)] == ["two:0"]
    assert await store.delete(MINE, "two")
    assert await store.search_text(MINE, "word", old, 5) == []
    query = np.ones((1, SPEC.dimensions), np.float32)
    assert [one.chunk_id for one in (await store.search_vectors(MINE, query, None, 5))[0]] == ["one:0"]
    assert [one.id for one in await store.documents(MINE)] == ["one"]
    assert await store.documents(MINE, after="one") == []


async def test_wrong_vectors_models_and_ids_are_refused_and_change_nothing(store: Store) -> None:
    for asked in (store.describe, store.spec):
        with pytest.raises(NamespaceNotFound, match="store"):
            await asked(MINE)
    await store.create(MINE, SPEC)
    await store.create(MINE, SPEC)
    with pytest.raises(SpecMismatch, match="test-model"):
        await store.create(MINE, NamespaceSpec(8, "other"))
    made, chunks = document("one", ["text"])
    await store.put(MINE, made, chunks)
    bad = Chunk("one:0", "one", 0, 0, 4, "text", {}, np.ones(9, np.float32))
    with pytest.raises(SpecMismatch, match="9 dimensions"):
        await store.put(MINE, made, [bad])
    with pytest.raises(SpecMismatch, match="9 dimensions"):
        await store.search_vectors(MINE, np.ones((1, 9), np.float32), None, 1)
    other, _ = document("two", ["x"])
    stolen = Chunk("one:0", "two", 0, 0, 1, "x", {}, np.ones(8, np.float32))
    with pytest.raises(BadInput, match="another document"):
        await store.put(MINE, other, [stolen])
    assert await store.document(MINE, "two") is None
    assert [chunk.text for chunk in await store.chunks(MINE, "one")] == ["text"]


async def test_random_filters_select_what_the_oracle_selects(store: Store) -> None:
    draw = random.Random(11)
    await store.create(MINE, SPEC)
    there = {f"d{i}": random_attributes(draw) for i in range(25)}
    for id, attributes in there.items():
        await store.put(MINE, *document(id, ["word"], attributes))
    query = np.ones((1, SPEC.dimensions), np.float32)
    for _ in range(60):
        where = parse_filter(random_filter(draw))
        expected = {f"{id}:0" for id, attributes in there.items() if where.matches(attributes)}
        [found] = await store.search_vectors(MINE, query, where, 25)
        assert {one.chunk_id for one in found} == expected, str(where)
        texts = await store.search_text(MINE, "word", where, 25)
        assert {one.chunk_id for one in texts} == expected, str(where)


async def test_a_dropped_namespace_takes_its_index_along(store: Store) -> None:
    assert isinstance(store, SqliteStore | PostgresStore | QdrantStore)
    held = []
    for _ in range(2):
        await store.create(MINE, SPEC)
        await store.put(MINE, *document("one", ["word"] * 50))
        assert len(await store.search_text(MINE, "word", None, 99)) == 50
        held.append(store.index_bytes)
        assert await store.drop(MINE)
        assert store.index_bytes == 0
        assert not await store.drop(MINE)
    assert held[0] == held[1] > 0


async def test_a_filter_of_one_type_does_not_answer_for_another(store: Store) -> None:
    """True equals 1.0 in Python: the filters that follow each other must not share a kept mask."""
    await store.create(MINE, SPEC)
    there: list[Attributes] = [{"flag": True}, {"flag": 1}, {"flag": "1"}, {"flag": False}, {"flag": 0}]
    for i, attributes in enumerate(there):
        await store.put(MINE, *document(f"d{i}", ["word"], attributes))
    query = np.ones((1, SPEC.dimensions), np.float32)
    for kind in ("eq", "ne"):
        for i, attributes in enumerate(there):
            where = parse_filter({"type": kind, "key": "flag", "value": attributes["flag"]})
            expected = {f"d{i}:0"} if kind == "eq" else {f"d{j}:0" for j in range(len(there)) if j != i}
            [found] = await store.search_vectors(MINE, query, where, 9)
            assert {one.chunk_id for one in found} == expected, str(where)
            texts = await store.search_text(MINE, "word", where, 9)
            assert {one.chunk_id for one in texts} == expected, str(where)


async def test_vector_search_is_exact(store: Store) -> None:
    await store.create(MINE, SPEC)
    for i in range(12):
        await store.put(MINE, *document(f"d{i}", [f"text {i} {j}" for j in range(20)]))
    chunks = [chunk for i in range(12) for chunk in await store.chunks(MINE, f"d{i}", vectors=True)]
    matrix = np.array([chunk.vector for chunk in chunks], np.float64)
    queries = np.random.default_rng(6).normal(size=(4, SPEC.dimensions)).astype(np.float32)
    for query, found in zip(queries, await store.search_vectors(MINE, queries, None, 10), strict=True):
        scores = matrix @ (query / np.linalg.norm(query))
        best = np.argsort(-scores)[:10]
        assert [one.chunk_id for one in found] == [chunks[i].id for i in best]
        np.testing.assert_allclose([one.score for one in found], scores[best], atol=1e-5)


async def test_a_second_process_sees_every_write(store: Store, tmp_path: Path) -> None:
    """Another store object on the same data stands for another process: its index follows the revision."""
    other: Store
    if isinstance(store, SqliteStore):
        other = SqliteStore(tmp_path / "retrieval.sqlite")
    elif isinstance(store, QdrantStore):
        other = QdrantStore(store.url, prefix=store.prefix)
    else:
        assert isinstance(store, PostgresStore)
        other = PostgresStore(store.url)
    await store.create(MINE, SPEC)
    for step in range(4):
        await store.put(MINE, *document("changing", [f"step{step}", "common"]))
        await store.put(MINE, *document(f"d{step}", ["common"]))
        assert [one.chunk_id for one in await other.search_text(MINE, f"step{step}", None, 5)] == [
            "changing:0"
        ]
        assert await other.search_text(MINE, f"step{step - 1}", None, 5) == []
        query = np.ones((1, SPEC.dimensions), np.float32)
        assert len((await other.search_vectors(MINE, query, None, 50))[0]) == 3 + step
    await store.delete(MINE, "changing")
    assert len(await other.search_text(MINE, "common", None, 50)) == 4
    await other.close()
