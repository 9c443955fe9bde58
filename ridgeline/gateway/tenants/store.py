"""Store: opens the database of a gateway and reads policies from it. Changes are made by `registry`.

One per process. `prepare` migrates the tables to the newest version and fixes the secret for digests of keys;
every user of the store calls it first, so that a database that was unreachable at the start is used as soon
as it is back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path

import msgspec

from ridgeline.gateway.tenants import schema
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.digest import MIN_SERVER_SECRET, new_server_secret
from ridgeline.gateway.tenants.errors import StoreError, store_errors
from ridgeline.gateway.tenants.key_table import Changes, KeyEntry, Secret
from ridgeline.gateway.tenants.keys import Key, Team
from ridgeline.gateway.tenants.secret_file import made_once, read_secret
from ridgeline.storage.database import Database, Row, T, Value, Work, statement
from ridgeline.storage.sqlite import SqliteDatabase

_key_of = msgspec.json.Decoder(Key).decode
_team_of = msgspec.json.Decoder(Team).decode


class Store:
    def __init__(self, config: StoreConfig, state_dir: Path) -> None:
        self.config = config
        self.state_dir = state_dir.expanduser()
        self._database = _database(config, self.state_dir)
        self._secret = ""
        self._preparing = asyncio.Lock()

    @property
    def server_secret(self) -> str:
        if not self._secret:
            raise RuntimeError("the store is not prepared")
        return self._secret

    @property
    def is_shared(self) -> bool:
        """Whether it is PostgreSQL, which may be unreachable while this gateway runs."""
        return self._database.dialect == "postgres"

    async def prepare(self) -> None:
        """StoreUnavailable: try again later. StoreError: an operator must act."""
        async with self._preparing:
            if self._secret:
                return
            with store_errors():
                await self._database.migrate(schema.COMPONENT, schema.steps(self._database.dialect))
            own = await asyncio.to_thread(self._own_secret)
            with store_errors():
                self._secret = await self._database.write(_settle_secret(own))

    async def close(self) -> None:
        await self._database.close()

    # ---- what workers poll ----

    async def version(self) -> int:
        rows = await self.ask("SELECT version FROM ridgeline_policy WHERE id = 1")
        return int(rows[0][0])

    async def changes(self, since: int) -> Changes:
        """Changes since the version `since`, in one snapshot of the store."""
        return await self.read(_changes(since))

    # ---- transactions ----

    async def write(self, work: Work[T]) -> T:
        await self._prepared()
        with store_errors():
            return await self._database.write(work)

    async def read(self, work: Work[T]) -> T:
        await self._prepared()
        with store_errors():
            return await self._database.read(work)

    async def ask(self, sql: str, *values: Value) -> list[Row]:
        await self._prepared()
        with store_errors():
            return await self._database.ask(sql, *values)

    async def _prepared(self) -> None:
        if not self._secret:
            await self.prepare()

    def _own_secret(self) -> str | None:
        """This gateway's secret, from a file; None: the one in PostgreSQL for all gateways."""
        path = self.config.secret_file
        if path is not None:
            secret = read_secret(path.expanduser())
            if len(secret) < MIN_SERVER_SECRET:
                raise StoreError(f"{path}: holds fewer than {MIN_SERVER_SECRET} characters")
            return secret
        if self.is_shared:
            return None
        path = self.state_dir / "secret"
        made_once(path, new_server_secret)
        return read_secret(path)


def _database(config: StoreConfig, state_dir: Path) -> Database:
    if config.url:
        with store_errors():
            from ridgeline.storage.postgres import PostgresDatabase  # needs asyncpg

        return PostgresDatabase(config.url, config.connections, config.timeout_s)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"{state_dir}: cannot be made: {error.strerror}") from error
    return SqliteDatabase(state_dir / "tenants.db", config.timeout_s)


def _settle_secret(own: str | None) -> Work[str]:
    """The secret in use; refused if the store's keys were made with another, since no key would match."""
    if own is None:
        secret = yield from _kept("server_secret", new_server_secret())
    else:
        secret = own
    # These bytes are part of every store that exists: never change them.
    check = hmac.new(secret.encode(), b"ridgeline keys", hashlib.sha256).hexdigest()
    if (yield from _kept("server_secret_check", check)) != check:
        raise StoreError(
            "this store's keys were made with another secret: "
            "restore its file (secret in the state directory, or store.secret_file)"
        )
    return secret


def _kept(name: str, value: str) -> Work[str]:
    """The store's value of this name; stores the given value if there is none."""
    yield (
        "INSERT INTO ridgeline_meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
        (name, value),
    )
    rows = yield "SELECT value FROM ridgeline_meta WHERE name = ?", (name,)
    return str(rows[0][0])


def _changes(since: int) -> Work[Changes]:
    ((version, epoch),) = yield "SELECT version, epoch FROM ridgeline_policy WHERE id = 1", ()
    whole = since < epoch or since > version  # newer than the store: the store was restored from a backup
    since = 0 if whole else since
    keys = yield from statement("SELECT id, document FROM ridgeline_keys WHERE version > ?", since)
    secrets = yield from statement(
        "SELECT s.key_id, s.digest, s.until_ms FROM ridgeline_secrets s"
        " JOIN ridgeline_keys k ON k.id = s.key_id WHERE k.version > ?",
        since,
    )
    teams = yield from statement("SELECT document FROM ridgeline_teams WHERE version > ?", since)
    gone = [] if whole else (yield "SELECT id FROM ridgeline_gone WHERE version > ?", (since,))
    by_key: dict[str, list[Secret]] = {id: [] for id, _ in keys}
    for key_id, digest, until_ms in secrets:
        by_key[key_id].append(Secret(digest, None if until_ms is None else until_ms / 1000))
    entries = tuple(KeyEntry(_key_of(document), tuple(by_key[id])) for id, document in keys)
    return Changes(
        version,
        whole,
        keys=entries,
        teams=tuple(_team_of(document) for (document,) in teams),
        gone=tuple(id for (id,) in gone),
    )
