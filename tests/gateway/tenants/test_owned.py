"""Whose an object is: for every worker, for good, and no other tenant's."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.tenants import owned as module
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.owned import OwnedObjects
from ridgeline.gateway.tenants.store import Store


async def test_what_one_worker_remembers_another_one_knows(store: Store) -> None:
    one, two = OwnedObjects(store), OwnedObjects(store)
    assert await two.owner("file-1") is None
    assert await one.remember("file-1", "team_a", "gpu", "file", {"model": "m"})
    found = await two.owner("file-1")
    assert found is not None
    assert (found.tenant, found.upstream, found.kind, found.meta) == ("team_a", "gpu", "file", {"model": "m"})
    assert await two.owner("file-1") is found  # from memory


async def test_an_id_stays_with_its_first_owner(store: Store) -> None:
    one, two = OwnedObjects(store), OwnedObjects(store)
    assert await one.remember("resp-1", "team_a", "gpu", "response")
    assert not await two.remember("resp-1", "team_b", "other", "response")
    assert await two.remember("resp-1", "team_a", "gpu", "response")
    for objects in (one, two, OwnedObjects(store)):
        found = await objects.owner("resp-1")
        assert found is not None
        assert (found.tenant, found.upstream) == ("team_a", "gpu")
    both = await asyncio.gather(*(one.remember("resp-2", tenant, "gpu", "response") for tenant in "ab"))
    assert both == [True, False]


async def test_what_is_remembered_at_once_is_written_together_and_all_of_it_is_there(store: Store) -> None:
    objects = OwnedObjects(store)
    writes = 0
    real = store.write

    async def counted(work):  # type: ignore[no-untyped-def]
        nonlocal writes
        writes += 1
        return await real(work)

    store.write = counted  # type: ignore[method-assign]
    done = await asyncio.gather(*(objects.remember(f"resp-{n}", "t", "gpu", "response") for n in range(300)))
    assert all(done)
    assert writes < 10
    assert len(await objects.owned("t", "response", limit=1000)) == 300


async def test_a_tenant_sees_its_own_of_one_kind_page_by_page_the_newest_first(store: Store) -> None:
    objects = OwnedObjects(store)
    for n in range(3):
        await objects.remember(f"file-{n}", "a", "gpu", "file")
        await asyncio.sleep(0.002)  # the order is that of milliseconds
    await objects.remember("file-b", "b", "gpu", "file")
    await objects.remember("batch-a", "a", "gpu", "batch")
    listed = await objects.owned("a", "file")
    assert [one.id for one in listed] == ["file-2", "file-1", "file-0"]
    assert [one.id for one in await objects.owned("a", "file", after=listed[0], limit=1)] == ["file-1"]


async def test_a_batch_is_pending_until_one_worker_settles_it(store: Store) -> None:
    one, two = OwnedObjects(store), OwnedObjects(store)
    await one.remember("batch-1", "a", "gpu", "batch", {"key": "key_1"})
    await one.remember("file-1", "a", "gpu", "file")
    assert [(o.id, o.meta) for o in await two.pending("batch")] == [("batch-1", {"key": "key_1"})]
    assert await two.pending("file") == []
    assert sorted(await asyncio.gather(one.settled("batch-1"), two.settled("batch-1"))) == [False, True]
    assert await one.pending("batch") == []
    assert await one.owner("batch-1") is not None


async def test_a_forgotten_object_is_gone(store: Store) -> None:
    objects = OwnedObjects(store)
    await objects.remember("file-1", "a", "gpu", "file")
    await objects.forget("file-1")
    assert await objects.owner("file-1") is None


async def test_memory_holds_the_recently_used_and_a_tenant_no_more_than_its_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 10)
    object.__setattr__(store.config, "max_owned", 5)
    objects = OwnedObjects(store, remembered=3)
    await objects.remember("batch-1", "a", "gpu", "batch")  # pending: not to be lost
    await objects.remember("vs-1", "a", "gpu", "vector_store")  # used for long
    for n in range(20):
        await objects.remember(f"file-{n}", "a", "gpu", "file")
    await objects.remember("file-b", "b", "gpu", "file")
    assert len(objects._known) == 3
    assert len(await objects.owned("a", "file", limit=100)) <= 5 + 10
    assert len(await objects.pending("batch")) == 1
    assert await objects.owner("file-0") is None
    assert await objects.owner("vs-1") is not None
    assert await objects.owner("file-b") is not None


async def test_ids_without_bounds_are_refused(store: Store) -> None:
    objects = OwnedObjects(store)
    for id in ("", "x" * 257, "a\0b"):
        with pytest.raises(BadRequest):
            await objects.remember(id, "a", "gpu", "file")
        assert await objects.owner(id) is None
    with pytest.raises(BadRequest, match="16384"):
        await objects.remember("file-1", "a", "gpu", "file", {"much": "x" * 20_000})


async def test_what_could_not_be_written_is_said_and_not_remembered(store: Store) -> None:
    objects = OwnedObjects(store)

    async def away(work):  # type: ignore[no-untyped-def]
        raise StoreUnavailable("away")

    real, store.write = store.write, away  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await objects.remember("file-1", "a", "gpu", "file")
    store.write = real  # type: ignore[method-assign]
    assert await objects.owner("file-1") is None
    assert await objects.remember("file-1", "a", "gpu", "file")
