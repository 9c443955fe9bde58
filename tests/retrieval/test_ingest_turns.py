"""Whose file is next: vector stores take turns, long files give up their place, removed files end at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.retrieval.ingest.job_queue import JobQueue
from ridgeline.retrieval.ingest.records import StoreFile
from ridgeline.retrieval.types import Chunk, Document, Namespace, Vector
from tests.patience import PATIENCE_S
from tests.retrieval.ingest_bench import Bench, opened_bench
from tests.retrieval.word_embedder import WordEmbedder


class Held(WordEmbedder):
    """Embeds nothing before `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.released = asyncio.Event(), asyncio.Event()

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        self.began.set()
        await self.released.wait()
        return await super().embed(texts)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """One file at a time."""
    async with opened_bench(tmp_path, at_once=1) as made:
        yield made


async def held(bench: Bench, first: StoreFile) -> tuple[Held, StoreFile]:
    """A file in work that does not end before its embedder is released."""
    bench.embedder = embedder = Held()
    (file,) = await bench.take_up(first)
    async with asyncio.timeout(PATIENCE_S):
        await embedder.began.wait()
    return embedder, file


def stored_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of documents as they are stored."""
    order: list[str] = []
    put = bench.store.put

    async def noted(namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        await put(namespace, document, chunks)
        order.append(document.id)

    monkeypatch.setattr(bench.store, "put", noted)
    return order


@pytest.mark.parametrize("name", ["waiting.txt", "first.txt"], ids=["waiting", "in work"])
async def test_a_removed_file_waits_for_no_other(bench: Bench, name: str) -> None:
    embedder, first = await held(bench, bench.file("first.txt", "green tea"))
    rest = await bench.take_up(bench.file("waiting.txt", "black tea"), bench.file("last.txt", "white tea"))
    async with asyncio.timeout(PATIENCE_S):  # nothing is released before this has ended
        await bench.catalog.remove_file("vs", name)
        await bench.runner.forget("vs", name)
    embedder.released.set()
    left = [file for file in (first, *rest) if file.file_id != name]
    assert [file.status for file in await bench.settled(*left)] == ["completed"] * 2
    assert [one.id for one in await bench.store.documents(bench.namespace)] == sorted(
        file.file_id for file in left
    )


async def test_a_removed_store_ends_all_of_its_files(bench: Bench) -> None:
    embedder, _ = await held(bench, bench.file("a.txt", "green tea"))
    await bench.take_up(bench.file("b.txt", "black tea"))
    (other,) = await bench.take_up(bench.file("c.txt", "white tea", store_id="other"))
    async with asyncio.timeout(PATIENCE_S):
        await bench.catalog.remove_store("vs")
        await bench.runner.forget("vs")
    embedder.released.set()
    assert [file.status for file in await bench.settled(other)] == ["completed"]
    assert [one.namespace.name for one in await bench.store.namespaces("")] == ["other"]


async def test_one_store_with_many_files_does_not_hold_up_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = stored_in_order(bench, monkeypatch)
    embedder, first = await held(bench, bench.file("0.txt", "tea"))
    many = await bench.take_up(*(bench.file(f"{i}.txt", "tea") for i in range(1, 9)))
    few = await bench.take_up(*(bench.file(f"other{i}.txt", "tea", store_id="other") for i in range(2)))
    embedder.released.set()
    await bench.settled(first, *many, *few)
    assert len(order) == 11
    assert order.index("other0.txt") <= 2
    assert order.index("other1.txt") <= 4
    assert [name for name in order if "other" not in name] == [f"{i}.txt" for i in range(9)]


async def test_a_long_file_gives_up_its_place_and_repeats_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = stored_in_order(bench, monkeypatch)
    words = " ".join(f"w{i}" for i in range(6000))  # 10 parts
    embedder, long = await held(bench, bench.file("long.txt", words))
    (short,) = await bench.take_up(bench.file("short.txt", "tea", store_id="other"))
    embedder.released.set()
    ended = await bench.settled(long, short)
    assert [file.status for file in ended] == ["completed"] * 2
    assert order == ["short.txt", "long.txt"]
    pieces = bench.runner._cut(bench.folder / "long.txt", long, embedder).pieces
    assert embedder.embedded == len(pieces.ranges) + 1


async def test_the_later_of_two_versions_of_a_file_is_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first version's document is on its way into the store when the second is added."""
    async with opened_bench(tmp_path) as bench:
        put, began, second_waits = bench.store.put, asyncio.Event(), asyncio.Event()

        async def slow(namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
            if document.text == "first":
                began.set()
                await second_waits.wait()
            await put(namespace, document, chunks)

        monkeypatch.setattr(bench.store, "put", slow)
        (first,) = await bench.take_up(bench.file("a.txt", "first"))
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
        (second,) = await bench.take_up(bench.file("a.txt", "second"))
        await asyncio.sleep(0.1)  # without an order, the second is stored by now
        second_waits.set()
        await bench.settled(first, second)
        found = await bench.store.document(bench.namespace, "a.txt")
        assert found is not None
        assert found.text == "second"


def file_of(store: str, number: int) -> StoreFile:
    return StoreFile(number=number, store_id=store, file_id=str(number), filename="", created_at=0)


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_every_file_is_taken_once_and_no_store_waits_for_more_than_one_file_of_each_other(
    stores: list[str],
) -> None:
    queue = JobQueue()
    for number, store in enumerate(stores):
        queue.add(file_of(store, number))
    taken: list[StoreFile] = []
    while file := queue.take(set()):
        taken.append(file)
    assert sorted(file.number for file in taken) == list(range(len(stores)))
    for store in set(stores):
        places = [i for i, file in enumerate(taken) if file.store_id == store]
        assert [taken[i].number for i in places] == [i for i, one in enumerate(stores) if one == store]
        gaps = [after - before for before, after in zip([-1, *places], places, strict=False)]
        assert max(gaps) <= len(set(stores))


def test_a_store_without_a_file_in_work_comes_first() -> None:
    queue = JobQueue()
    for number, store in enumerate("aab"):
        queue.add(file_of(store, number))
    assert [file.number for file in (queue.take({"a"}), queue.take({"a", "b"})) if file] == [2, 0]
    queue.put_back(file_of("a", 0))
    assert [file.number for file in queue] == [0, 1]
    assert [file.number for file in queue.remove("a", "0")] == [0]
    assert [file.number for file in queue.remove("a")] == [1]
    assert queue.take(set()) is None
