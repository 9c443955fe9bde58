"""Databases that earlier versions made, by the SQL those versions ran: they open, and keep what they hold."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store import schema
from ridgeline.gateway.accounting.store.places import store_at
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.keys import Key
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from ridgeline.server.batches.store import BatchStore
from ridgeline.server.records.state import StateStore
from tests.storage.conftest import Place

# The first ledger: without audio_ms, characters and repeats.
LEDGER = (
    "CREATE TABLE ridgeline_ledger (request_id {text} NOT NULL DEFAULT '', at_ms {int} NOT NULL DEFAULT 0,"
    " key_id {text} NOT NULL DEFAULT '', team_id {text} NOT NULL DEFAULT '',"
    " endpoint {text} NOT NULL DEFAULT '', model_asked {text} NOT NULL DEFAULT '',"
    " model {text} NOT NULL DEFAULT '', upstream {text} NOT NULL DEFAULT '',"
    " upstream_model {text} NOT NULL DEFAULT '', credential {text} NOT NULL DEFAULT '',"
    " stream {bool} NOT NULL DEFAULT false, status {int} NOT NULL DEFAULT 0,"
    " outcome {text} NOT NULL DEFAULT '', error_code {text} NOT NULL DEFAULT '',"
    " tokens_in {int} NOT NULL DEFAULT 0, tokens_cached {int} NOT NULL DEFAULT 0,"
    " tokens_cache_write {int} NOT NULL DEFAULT 0, tokens_out {int} NOT NULL DEFAULT 0,"
    " tokens_reasoning {int} NOT NULL DEFAULT 0, usage_source {text} NOT NULL DEFAULT '',"
    " cost_pusd {int} NOT NULL DEFAULT 0, price_source {text} NOT NULL DEFAULT '',"
    " attempts {int} NOT NULL DEFAULT 0, cache {text} NOT NULL DEFAULT '', similarity {float},"
    " gateway_ms {float}, queue_ms {float}, ttft_ms {float}, stream_ms {float},"
    " total_ms {float} NOT NULL DEFAULT 0, route {text} NOT NULL DEFAULT '',"
    " guard {text} NOT NULL DEFAULT '', {unique} (request_id))",
    "CREATE INDEX ridgeline_ledger_at ON ridgeline_ledger (at_ms)",
    "CREATE INDEX ridgeline_ledger_key ON ridgeline_ledger (key_id, at_ms)",
    "CREATE INDEX ridgeline_ledger_team ON ridgeline_ledger (team_id, at_ms)",
    "CREATE INDEX ridgeline_ledger_model ON ridgeline_ledger (model, at_ms)",
    "INSERT INTO ridgeline_ledger (request_id, at_ms, key_id, stream, cost_pusd, total_ms)"
    " VALUES ('req_old', 5, 'key_a', true, 70, 1.5)",
)
SQLITE = {"text": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "INTEGER", "unique": "UNIQUE"}
POSTGRES = {
    "text": "text",
    "int": "bigint",
    "float": "double precision",
    "bool": "boolean",
    "unique": "PRIMARY KEY",
}

TENANTS = (
    "CREATE TABLE ridgeline_schema (component TEXT PRIMARY KEY, version BIGINT NOT NULL)",
    "CREATE TABLE ridgeline_policy (id BIGINT PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL,"
    " epoch BIGINT NOT NULL)",
    "INSERT INTO ridgeline_policy (id, version, epoch) VALUES (1, 2, 1)",
    "CREATE TABLE ridgeline_gone (id TEXT PRIMARY KEY, version BIGINT NOT NULL)",
    "CREATE TABLE ridgeline_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "INSERT INTO ridgeline_meta VALUES ('server_secret', 'rls-old-secret')",
    "INSERT INTO ridgeline_meta VALUES ('server_secret_check',"
    " '01815d49db3ab228713014818dde38acd2fbe81bc22d3a21abcf3f54ebed0964')",
    "CREATE TABLE ridgeline_teams (id TEXT PRIMARY KEY, version BIGINT NOT NULL, name TEXT NOT NULL UNIQUE,"
    " created_ms BIGINT NOT NULL, document TEXT NOT NULL)",
    "CREATE TABLE ridgeline_keys (id TEXT PRIMARY KEY, version BIGINT NOT NULL, name TEXT NOT NULL,"
    " team TEXT NOT NULL, created_ms BIGINT NOT NULL, revoked BIGINT NOT NULL, document TEXT NOT NULL)",
    "INSERT INTO ridgeline_keys VALUES"
    """ ('key_old', 2, 'app', '', 1, 0, '{"id": "key_old", "name": "app"}')""",
    "CREATE TABLE ridgeline_secrets (digest TEXT PRIMARY KEY,"
    " key_id TEXT NOT NULL REFERENCES ridgeline_keys (id) ON DELETE CASCADE,"
    " created_ms BIGINT NOT NULL, until_ms BIGINT)",
    "CREATE TABLE ridgeline_owned (object_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, upstream TEXT NOT NULL,"
    " kind TEXT NOT NULL, created_ms BIGINT NOT NULL, pending BIGINT NOT NULL, meta TEXT NOT NULL)",
    "CREATE TABLE ridgeline_audit (id {identity}, at_ms BIGINT NOT NULL, who TEXT NOT NULL,"
    " action TEXT NOT NULL, target TEXT NOT NULL, address TEXT NOT NULL, outcome TEXT NOT NULL,"
    " state_before TEXT, state_after TEXT)",
    "INSERT INTO ridgeline_schema (component, version) VALUES ('tenants', 1)",
)

# The server's state before batches had usage.
STATE = (
    "CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
    " purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER, body BLOB NOT NULL)",
    "CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
    " status TEXT NOT NULL, input_file_id TEXT NOT NULL, expires_at INTEGER NOT NULL, ending TEXT,"
    " output_seconds INTEGER NOT NULL, completed INTEGER NOT NULL DEFAULT 0,"
    " failed INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL)",
    "CREATE TABLE batch_lines (batch_id TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,"
    " length INTEGER NOT NULL, custom_id TEXT NOT NULL, outcome INTEGER NOT NULL DEFAULT 0, answer BLOB,"
    " PRIMARY KEY (batch_id, number))",
    "INSERT INTO batches (id, status, input_file_id, expires_at, output_seconds, completed, body) VALUES"
    " ('batch_old', 'in_progress', 'file_old', 9, 60, 3, '{"
    '"id": "batch_old", "endpoint": "/v1/completions", "input_file_id": "file_old",'
    ' "completion_window": "24h", "status": "in_progress", "created_at": 1, "expires_at": 9,'
    ' "request_counts": {"total": 4, "completed": 0, "failed": 0}'
    "}')",
)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """Of the store in the settings: empty for SQLite in the state directory."""
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def run_sqlite(path: Path, statements: Sequence[str]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for one in statements:
            connection.execute(one)
        connection.commit()


async def run_postgres(url: str, statements: Sequence[str]) -> None:
    connection = await asyncpg.connect(url)
    for one in statements:
        await connection.execute(one)
    await connection.close()


def test_an_old_ledger_keeps_its_rows_and_takes_new_ones(url: str, tmp_path: Path) -> None:
    if not url:
        run_sqlite(tmp_path / "ledger.sqlite", [one.format(**SQLITE) for one in LEDGER])
    else:
        asyncio.run(run_postgres(url, [one.format(**POSTGRES) for one in LEDGER]))
    store = store_at(url, tmp_path, 10.0)
    assert store.known(["req_old", "req_new"]) == {"req_old"}
    assert store.insert([LedgerRow("req_old", 1), LedgerRow("req_new", 6, audio_ms=8, repeats=2)]) == 1
    columns = "request_id, at_ms, stream, cost_pusd, total_ms, audio_ms, characters, repeats"
    assert store.query(f"SELECT {columns} FROM ridgeline_ledger ORDER BY request_id") == [
        ("req_new", 6, False, 0, 0.0, 8, 0, 2),
        ("req_old", 5, True, 70, 1.5, 0, 0, 0),
    ]
    store.close()
    again = store_at(url, tmp_path, 10.0)
    assert again.remove_before(6, 10) == 1
    assert again.query("SELECT component, version FROM ridgeline_schema") == [("ledger", 1)]
    again.close()


def test_the_ledgers_table_has_a_column_for_each_field_of_a_row(place: Place) -> None:
    """A field that is new needs a migration."""
    database = place.open()
    database.migrate(schema.COMPONENT, schema.steps(database.dialect))
    sql = {
        "sqlite": "SELECT name FROM pragma_table_info(?)",
        "postgres": "SELECT column_name::text FROM information_schema.columns WHERE table_name = ?",
    }[database.dialect]
    names = [row[0] for row in database.ask(sql, schema.TABLE)]
    assert sorted(names) == sorted(LedgerRow.__struct_fields__)


async def test_an_old_store_of_keys_keeps_its_keys_and_takes_new_ones(url: str, tmp_path: Path) -> None:
    if not url:
        identity = "INTEGER PRIMARY KEY AUTOINCREMENT"
        run_sqlite(tmp_path / "tenants.db", [one.replace("{identity}", identity) for one in TENANTS])
        (tmp_path / "secret").write_text("rls-old-secret")
    else:
        identity = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
        await run_postgres(url, [one.replace("{identity}", identity) for one in TENANTS])
    store = Store(StoreConfig(url=url), tmp_path)
    registry = Registry(store)
    assert (await registry.key("key_old")).key == Key("key_old", "app")
    made, _ = await registry.create_key(lambda id: Key(id, "new"), Actor("tester", "127.0.0.1"))
    found = await store.changes(0)
    assert {entry.key.id for entry in found.keys} == {"key_old", made.key.id}
    assert await store.ask("SELECT component, version FROM ridgeline_schema") == [("tenants", 1)]
    await store.close()


async def test_an_old_state_directory_of_a_server_keeps_its_batches(tmp_path: Path) -> None:
    run_sqlite(tmp_path / "state.sqlite", STATE)
    with closing(StateStore(tmp_path)) as state:
        batch = await BatchStore(state).batch("batch_old")
        assert batch.request_counts.completed == 3
        assert batch.usage is not None
        assert batch.usage.total_tokens == 0
        assert await BatchStore(state).ending("batch_old") == ("completed", 60)
