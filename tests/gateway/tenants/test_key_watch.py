"""What workers know of keys: soon after a change, in every process, and while the store is away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.digest import new_secret
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.key_table import Changes, KeyEntry, KeyTable, Secret
from ridgeline.gateway.tenants.key_table_copy import FILE, read_copy, write_copy
from ridgeline.gateway.tenants.key_watch import KeyWatch
from ridgeline.gateway.tenants.keys import Key, Limits, Team
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from tests.gateway.services import OwnPostgres
from tests.gateway.tenants.conftest import BY
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S


@contextlib.asynccontextmanager
async def watching(
    store: Store, changed: Callable[[KeyTable], None] | None = None
) -> AsyncIterator[KeyWatch]:
    watch = KeyWatch(store, changed=changed)
    await watch.start()
    try:
        yield watch
    finally:
        await watch.stop()


async def test_every_process_on_a_store_sees_a_change_and_then_a_revocation(
    store_config: StoreConfig, tmp_path: Path
) -> None:
    """Two gateways with two workers each; with SQLite they are four workers of one."""
    folders = [tmp_path / name for name in ("one", "two")] if store_config.url else [tmp_path / "one"] * 2
    store = Store(store_config, folders[0])
    registry = Registry(store)
    record, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
    watchers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.tenants.watcher", store_config.url, str(folder), secret),
            stdout=asyncio.subprocess.PIPE,
        )
        for folder in folders
        for _ in range(2)
    ]

    async def seen() -> list[tuple[float, str]]:
        async with asyncio.timeout(PATIENCE_S):
            lines = [await watcher.stdout.readline() for watcher in watchers if watcher.stdout]
        return [(float(line.split()[0]), line.decode().split(maxsplit=1)[1].strip()) for line in lines]

    try:
        assert {known for _, known in await seen()} == {"app None"}
        limits = Limits(requests_per_minute=7)
        await registry.update_key(record.key.id, lambda key: msgspec.structs.replace(key, limits=limits), BY)
        assert {known for _, known in await seen()} == {"app 7"}
        await registry.revoke_key(record.key.id, BY)
        revoked_at = time.time()
        found = await seen()
        assert {known for _, known in found} == {"revoked_api_key"}
        print("seconds until the last process knew:", max(at for at, _ in found) - revoked_at)
    finally:
        for watcher in watchers:
            watcher.kill()
            await watcher.wait()
        await store.close()


async def test_a_change_is_told_and_only_once(store: Store) -> None:
    told: list[int] = []
    async with watching(store, lambda table: told.append(table.version)) as watch:
        first = watch.table.version
        await Registry(store).create_team(lambda id: Team(id, "red"), BY)
        await until(lambda: watch.table.version != first)
        assert await watch.refresh() is False
        assert told == [first, first + 1]
        assert not watch.is_stale
        assert watch.snapshot()["store_failures"] == 0


async def test_a_store_put_back_from_a_backup_is_read_anew(store: Store) -> None:
    registry = Registry(store)
    async with watching(store) as watch:
        _, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
        await until(lambda: watch.table.lookup(secret) is not None)
        await store.write(_without_keys())
        await until(lambda: watch.table.lookup(secret) is None)


async def test_keys_stay_known_while_postgresql_is_away_also_to_workers_that_start_meanwhile(
    tmp_path: Path,
) -> None:
    own = OwnPostgres()
    config = StoreConfig(url=own.url, timeout_s=60.0, poll_s=0.05)
    store, second, later = (Store(config, tmp_path) for _ in range(3))
    try:
        record, secret = await Registry(store).create_key(lambda id: Key(id, "app"), BY)
        async with watching(store) as watch:
            assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
            assert secret not in (tmp_path / FILE).read_text()
            own.stop()
            await until(lambda: watch.is_stale and watch.snapshot()["store_failures"] > 0)
            assert watch.table.lookup(secret) == record.key
            with pytest.raises(StoreUnavailable):
                await Registry(store).revoke_key(record.key.id, BY)
            async with watching(second) as other:
                assert other.table.lookup(secret) == record.key
                assert other.is_stale
                with pytest.raises(StoreUnavailable):  # nothing is known of it anywhere
                    await KeyWatch(Store(replace(config), tmp_path / "elsewhere")).start()
                own.start()
                await Registry(later).revoke_key(record.key.id, BY)
                await until(lambda: watch.table.lookup(secret) is None)
                await until(lambda: other.table.lookup(secret) is None and not other.is_stale)
    finally:
        for one in (store, second, later):
            await one.close()
        own.remove()


async def test_a_copy_that_is_not_whole_is_none(tmp_path: Path) -> None:
    secret, path = new_secret(), tmp_path / FILE
    entries = tuple(KeyEntry(Key(f"key_{n}", "k"), (Secret(f"{n:064x}"),)) for n in range(450))
    own = KeyEntry(
        Key("key_own", "own"), (Secret(hmac.new(b"s" * 32, secret.encode(), "sha256").hexdigest()),)
    )
    write_copy(path, "s" * 32, Changes(7, True, (*entries, own), (Team("team_1", "t"),)))
    copy = read_copy(path)
    assert copy is not None
    assert (copy.version, copy.lookup(secret), len(list(copy.keys()))) == (7, own.key, 451)
    whole = path.read_bytes()
    for broken in (whole[:-20], b"".join(whole.splitlines(keepends=True)[:-1]), b"", b"{}\n"):
        path.write_bytes(broken)
        assert read_copy(path) is None
    path.unlink()
    assert read_copy(path) is None


async def test_a_sqlite_file_that_another_process_locks_is_waited_for_without_stopping_the_loop(
    tmp_path: Path,
) -> None:
    import sqlite3

    store = Store(StoreConfig(timeout_s=60.0), tmp_path)
    registry = Registry(store)
    await registry.create_team(lambda id: Team(id, "red"), BY)
    other = sqlite3.connect(tmp_path / "tenants.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = asyncio.create_task(registry.create_team(lambda id: Team(id, "blue"), BY))
    ticks = 0
    for _ in range(20):
        await asyncio.sleep(0.005)
        ticks += await store.version() > 0  # reads are not held up either
    assert not write.done()
    other.execute("ROLLBACK")
    other.close()
    assert (await write).team.name == "blue"
    assert ticks == 20
    await store.close()


async def test_a_store_that_stays_locked_is_unavailable_in_time(tmp_path: Path) -> None:
    import sqlite3

    store = Store(StoreConfig(timeout_s=0.1), tmp_path)
    await store.prepare()
    other = sqlite3.connect(tmp_path / "tenants.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        await Registry(store).create_team(lambda id: Team(id, "red"), BY)
    other.close()
    await Registry(store).create_team(lambda id: Team(id, "red"), BY)
    await store.close()


def _without_keys():  # type: ignore[no-untyped-def]
    yield "DELETE FROM ridgeline_secrets", ()
    yield "DELETE FROM ridgeline_keys", ()
    yield "UPDATE ridgeline_policy SET version = 1, epoch = 1", ()
