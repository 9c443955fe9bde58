"""The store, SQLite and PostgreSQL alike: what is kept, what is refused, which process may start at once."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import time
from pathlib import Path

import asyncpg
import msgspec
import pytest

from ridgeline.gateway.errors import BadRequest, NotFound
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable
from ridgeline.gateway.tenants.key_table import KeyTable
from ridgeline.gateway.tenants.keys import Key, Limits, Team
from ridgeline.gateway.tenants.registry import Conflict, Registry
from ridgeline.gateway.tenants.store import Store
from ridgeline.options import OptionError
from tests.gateway.tenants.conftest import BY


async def key_table_of(store: Store) -> KeyTable:
    return KeyTable(store.server_secret).apply(await store.changes(0))


async def test_a_created_key_is_found_by_its_secret_with_all_it_was_given(store: Store) -> None:
    registry = Registry(store)
    team = (await registry.create_team(lambda id: Team(id, "red", weight=2.0), BY)).team
    limits = Limits(requests_per_minute=5, daily_usd=0.25)
    record, secret = await registry.create_key(
        lambda id: Key(id, "app", team.id, models=("gpt-*",), limits=limits, expires_at=time.time() + 60), BY
    )
    table = await key_table_of(store)
    assert table.lookup(secret) == record.key
    assert table.team(team.id) == team
    assert (await registry.key(record.key.id)) == record


async def test_the_secret_of_a_key_lies_nowhere_in_the_store(store: Store, tmp_path: Path) -> None:
    registry = Registry(store)
    record, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
    _, newer = await registry.rotate_key(record.key.id, 60, BY)
    tables = ("keys", "secrets", "teams", "audit", "meta", "policy", "owned")
    rows = [row for table in tables for row in await store.ask(f"SELECT * FROM ridgeline_{table}")]
    text = repr(rows) + "".join(
        path.read_bytes().decode("latin-1") for path in tmp_path.iterdir() if path.is_file()
    )
    assert record.key.id in text
    for raw in (secret, newer):
        assert raw not in text
        assert raw.removeprefix("rl-") not in text


async def test_each_change_has_a_version_of_its_own_and_only_what_changed_is_read(store: Store) -> None:
    registry = Registry(store)
    first, _ = await registry.create_key(lambda id: Key(id, "first"), BY)
    version = await store.version()
    second, _ = await registry.create_key(lambda id: Key(id, "second"), BY)
    assert await store.version() == version + 1
    assert [entry.key for entry in (await store.changes(version)).keys] == [second.key]
    await registry.update_key(first.key.id, lambda key: msgspec.structs.replace(key, name="renamed"), BY)
    changes = await store.changes(version + 1)
    assert [entry.key.name for entry in changes.keys] == ["renamed"]
    assert not changes.whole
    assert (await store.changes(version + 2)).keys == ()


async def test_a_rotated_key_has_a_new_secret_and_the_old_one_ends_after_its_grace(store: Store) -> None:
    registry = Registry(store)
    record, first = await registry.create_key(lambda id: Key(id, "app"), BY)
    rotated, second = await registry.rotate_key(record.key.id, 60, BY)
    table = await key_table_of(store)
    assert table.lookup(first) == table.lookup(second) == record.key
    assert len(rotated.old_secrets_until_ms) == 1
    _, third = await registry.rotate_key(record.key.id, 0, BY)
    table = await key_table_of(store)
    assert table.lookup(first) is table.lookup(second) is None
    assert table.lookup(third) == record.key


async def test_a_grace_is_never_made_longer_by_a_later_rotation(store: Store) -> None:
    registry = Registry(store)
    record, _ = await registry.create_key(lambda id: Key(id, "app"), BY)
    id = record.key.id
    (first_end,) = (await registry.rotate_key(id, 10, BY))[0].old_secrets_until_ms
    ends = (await registry.rotate_key(id, 1000, BY))[0].old_secrets_until_ms
    assert ends[0] == first_end
    await registry.rotate_key(id, 1000, BY)
    with pytest.raises(Conflict, match="still valid"):
        await registry.rotate_key(id, 1000, BY)


async def test_a_revoked_key_stays_revoked_and_may_be_deleted(store: Store) -> None:
    registry = Registry(store)
    record, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
    id = record.key.id
    with pytest.raises(Conflict, match="revoke it first"):
        await registry.delete_key(id, BY)
    version = await store.version()
    await registry.revoke_key(id, BY)
    table = await key_table_of(store)
    assert table.lookup(secret) is None
    assert table.refusal(secret).code == "revoked_api_key"
    for again in (
        registry.revoke_key(id, BY),
        registry.rotate_key(id, 0, BY),
        registry.update_key(id, lambda key: key, BY),
    ):
        with pytest.raises(Conflict, match="revoked"):
            await again
    assert await store.version() == version + 1  # what is refused changes nothing
    await registry.delete_key(id, BY)
    with pytest.raises(NotFound):
        await registry.key(id)
    changes = await store.changes(version + 1)
    assert (changes.whole, changes.keys, changes.gone) == (False, (), (id,))
    assert table.apply(changes).refusal(secret).code == "invalid_api_key"


async def test_a_worker_that_is_far_behind_a_deletion_reads_everything_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.gateway.tenants.registry.GONE_VERSIONS", 2)
    registry = Registry(store)
    kept, _ = await registry.create_key(lambda id: Key(id, "kept"), BY)
    versions = []
    for name in ("a", "b"):
        versions.append(await store.version())
        team = (await registry.create_team(lambda id, name=name: Team(id, name), BY)).team
        await registry.delete_team(team.id, BY)
    last = await store.changes(versions[1])
    assert (last.whole, len(last.gone)) == (False, 1)
    far = await store.changes(versions[0])
    assert (far.whole, [entry.key for entry in far.keys], far.gone) == (True, [kept.key], ())


async def test_a_team_must_exist_have_a_name_of_its_own_and_no_keys_when_it_goes(store: Store) -> None:
    registry = Registry(store)
    with pytest.raises(BadRequest, match="team") as refused:
        await registry.create_key(lambda id: Key(id, "app", "team_none"), BY)
    assert refused.value.param == "team"
    team = (await registry.create_team(lambda id: Team(id, "red"), BY)).team
    with pytest.raises(Conflict, match="name"):
        await registry.create_team(lambda id: Team(id, "red"), BY)
    record, _ = await registry.create_key(lambda id: Key(id, "app", team.id), BY)
    with pytest.raises(Conflict, match="1 keys"):
        await registry.delete_team(team.id, BY)
    await registry.revoke_key(record.key.id, BY)
    await registry.delete_team(team.id, BY)
    assert (await key_table_of(store)).team(team.id) is None


async def test_keys_are_listed_by_team_and_name_page_by_page(store: Store) -> None:
    registry = Registry(store)
    team = (await registry.create_team(lambda id: Team(id, "red"), BY)).team
    made = []
    for name in ("k0", "k1", "k0", "k1", "k0"):
        record, _ = await registry.create_key(lambda id, name=name: Key(id, name, team.id), BY)
        made.append(record)
    await registry.create_key(lambda id: Key(id, "alone"), BY)
    everything = {"team": None, "name": None, "with_revoked": False, "after": "", "limit": 100}
    assert len(await registry.keys(**everything)) == 6
    assert len(await registry.keys(**everything | {"team": team.id})) == 5
    assert {r.key.name for r in await registry.keys(**everything | {"name": "k1"})} == {"k1"}
    first = await registry.keys(**everything | {"limit": 4})
    rest = await registry.keys(**everything | {"after": first[-1].key.id})
    assert len(first) + len(rest) == 6
    await registry.revoke_key(made[0].key.id, BY)
    assert len(await registry.keys(**everything)) == 5
    assert len(await registry.keys(**everything | {"with_revoked": True})) == 6


async def test_no_more_keys_are_made_than_the_store_may_hold(
    store_config: StoreConfig, tmp_path: Path
) -> None:
    store = Store(_with(store_config, max_keys=1), tmp_path)
    registry = Registry(store)
    await registry.create_key(lambda id: Key(id, "first"), BY)
    with pytest.raises(Conflict, match="1 keys"):
        await registry.create_key(lambda id: Key(id, "second"), BY)
    await store.close()


async def test_a_change_whose_audit_record_cannot_be_written_does_not_happen(
    store: Store, tmp_path: Path
) -> None:
    registry = Registry(store)
    record, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
    version = await store.version()
    await store.write(_statements("ALTER TABLE ridgeline_audit RENAME TO ridgeline_audit_away"))
    with pytest.raises((StoreUnavailable, asyncpg.PostgresError)):
        await registry.revoke_key(record.key.id, BY)
    assert (await key_table_of(store)).lookup(secret) == record.key
    assert await store.version() == version


async def test_the_audit_log_tells_what_changed_and_cannot_be_changed_itself(store: Store) -> None:
    registry = Registry(store)
    record, secret = await registry.create_key(lambda id: Key(id, "app"), BY)
    id = record.key.id
    await registry.update_key(id, lambda key: msgspec.structs.replace(key, priority=0), BY)
    await registry.record(BY, "key.create", "", "refused", after={"error": "invalid_request"})
    entries = await registry.audit(None, None, 100)
    assert [(e.action, e.outcome, e.who, e.address) for e in entries] == [
        ("key.create", "done", "tester", "127.0.0.1"),
        ("key.update", "done", "tester", "127.0.0.1"),
        ("key.create", "refused", "tester", "127.0.0.1"),
    ]
    update = entries[1]
    assert update.before is not None
    assert update.after is not None
    assert msgspec.json.decode(update.before)["priority"] == 1
    assert msgspec.json.decode(update.after)["priority"] == 0
    assert secret not in repr(entries)
    assert await registry.audit(None, entries[0].id, 1) == [update]
    assert await registry.audit(entries[-1].at_ms + 1, None, 100) == []
    for statement in ("UPDATE ridgeline_audit SET who = 'x'", "DELETE FROM ridgeline_audit"):
        with pytest.raises((sqlite3.IntegrityError, asyncpg.RaiseError), match="append only"):
            await store.write(_statements(statement))


async def test_gateways_that_start_at_once_make_the_tables_once_and_share_a_secret(
    store_config: StoreConfig, tmp_path: Path
) -> None:
    stores = [Store(store_config, tmp_path) for _ in range(6)]
    await asyncio.gather(*(store.prepare() for store in stores))
    assert len({store.server_secret for store in stores}) == 1
    _, secret = await Registry(stores[0]).create_key(lambda id: Key(id, "app"), BY)
    assert (await key_table_of(stores[5])).lookup(secret) is not None
    await asyncio.gather(*(store.close() for store in stores))


async def test_changes_made_at_the_same_time_are_all_kept_and_each_has_its_version(
    store_config: StoreConfig, tmp_path: Path
) -> None:
    stores = [Store(store_config, tmp_path) for _ in range(3)]
    record, _ = await Registry(stores[0]).create_key(lambda id: Key(id, "app", models=()), BY)
    version = await stores[0].version()

    async def add(store: Store, model: str) -> None:
        await Registry(store).update_key(
            record.key.id, lambda key: msgspec.structs.replace(key, models=(*key.models, model)), BY
        )

    await asyncio.gather(*(add(store, f"m{i}-{j}") for i, store in enumerate(stores) for j in range(5)))
    assert len((await Registry(stores[1]).key(record.key.id)).key.models) == 15
    assert await stores[2].version() == version + 15
    await asyncio.gather(*(store.close() for store in stores))


async def test_another_secret_than_the_keys_were_made_with_is_refused(
    store_config: StoreConfig, tmp_path: Path
) -> None:
    one, two, short = tmp_path / "one", tmp_path / "two", tmp_path / "short"
    for path, text in ((one, "1" * 32), (two, "2" * 32), (short, "3" * 31)):
        path.write_text(text + "\n")
    first = Store(_with(store_config, secret_file=one), tmp_path)
    await first.prepare()
    assert first.server_secret == "1" * 32
    await first.close()
    for path, reason in (
        (two, "another secret"),
        (short, "fewer than 32"),
        (tmp_path / "none", "cannot be read"),
    ):
        other = Store(_with(store_config, secret_file=path), tmp_path)
        with pytest.raises(StoreError, match=reason):
            await other.prepare()
        await other.close()


async def test_tables_of_a_newer_version_are_left_alone(store: Store, tmp_path: Path) -> None:
    await store.write(_statements("UPDATE ridgeline_schema SET version = 99"))
    other = Store(store.config, tmp_path)
    with pytest.raises(StoreError, match="newer ridgeline"):
        await other.prepare()
    await other.close()


async def test_nobody_else_may_read_the_files_of_the_state_directory(tmp_path: Path) -> None:
    store = Store(StoreConfig(), tmp_path / "state")
    await Registry(store).create_key(lambda id: Key(id, "app"), BY)
    files = list((tmp_path / "state").iterdir())
    assert {path.name for path in files} >= {"secret", "tenants.db", "tenants.db-wal"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    await store.close()


async def test_a_postgresql_that_is_not_there_is_unavailable_without_its_address_or_password() -> None:
    store = Store(
        StoreConfig(url="postgresql://me:hunter2@127.0.0.1:9/none", timeout_s=2), Path("/nonexistent")
    )
    with pytest.raises(StoreUnavailable) as refused:
        await store.version()
    assert refused.value.status == 503
    for hidden in ("hunter2", "127.0.0.1", ":9"):
        assert hidden not in refused.value.message


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "tenants.db").write_text("not a database, and long enough to be seen as none " * 10)
    store = Store(StoreConfig(), tmp_path)
    with pytest.raises(StoreError, match=r"tenants\.db is not a SQLite database"):
        await store.prepare()
    await store.close()


def test_settings_of_the_store_are_checked() -> None:
    for wrong, name in (
        ({"url": "mysql://x"}, "url"),
        ({"poll_s": 0.5}, "poll_s"),
        ({"connections": 0}, "connections"),
    ):
        with pytest.raises(OptionError, match=rf"\[store\] {name} must"):
            StoreConfig(**wrong)


def _with(config: StoreConfig, **changes: object) -> StoreConfig:
    from dataclasses import replace

    return replace(config, **changes)


def _statements(*statements: str):  # type: ignore[no-untyped-def]
    for sql in statements:
        yield sql, ()
