"""FleetStore: the state that outlives the controller, in one SQLite file: replicas, models, events, lease.

A replica is written before it is started and removed after it has ended, so that the next controller finds
it after a kill between the two. Only the lease's holder can write (`lease.fenced`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ridgeline.fleet.controller.lease import STEPS as LEASE_STEPS
from ridgeline.fleet.controller.lease import Lease, fenced
from ridgeline.fleet.controller.room import Needs
from ridgeline.storage.database import Row, Value, Work, statement
from ridgeline.storage.sqlite import SqliteDatabase

TIMEOUT_S = 5.0
FILE = "fleet.db"
T = TypeVar("T")

STEPS = (
    (
        "CREATE TABLE fleet_facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE fleet_counters (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
        "CREATE TABLE fleet_replicas (id TEXT PRIMARY KEY, model TEXT NOT NULL, version TEXT NOT NULL, "
        "state TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, place TEXT NOT NULL, epoch TEXT NOT NULL, "
        "segments TEXT NOT NULL)",
        "CREATE TABLE fleet_models (name TEXT PRIMARY KEY, state TEXT NOT NULL)",
        "CREATE TABLE fleet_events (id INTEGER PRIMARY KEY, at DOUBLE PRECISION NOT NULL, "
        "kind TEXT NOT NULL, model TEXT NOT NULL, replica TEXT NOT NULL, text TEXT NOT NULL, "
        "facts TEXT NOT NULL)",
    ),
    (
        "ALTER TABLE fleet_replicas ADD COLUMN region TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE fleet_replicas ADD COLUMN pool TEXT NOT NULL DEFAULT ''",
    ),
    ("ALTER TABLE fleet_replicas ADD COLUMN price DOUBLE PRECISION NOT NULL DEFAULT 0",),
    (
        "CREATE TABLE fleet_decisions (id INTEGER PRIMARY KEY, model TEXT NOT NULL, "
        "first_at DOUBLE PRECISION NOT NULL, last_at DOUBLE PRECISION NOT NULL, count BIGINT NOT NULL, "
        "same TEXT NOT NULL, text TEXT NOT NULL, facts TEXT NOT NULL)",
    ),
    ("ALTER TABLE fleet_replicas ADD COLUMN needs TEXT NOT NULL DEFAULT '{}'",),
)
_COLUMNS = "id, model, version, state, created, place, epoch, segments, region, pool, price, needs"


class StoredDecisions(msgspec.Struct, frozen=True):
    """Equal decisions of the autoscaler in a row. text, facts: of the last one."""

    id: int
    model: str
    first_at: float  # seconds since 1970, for display
    last_at: float
    count: int
    key: str
    text: str
    facts: dict[str, Any]


def _stored_decisions(row: Sequence[Any]) -> StoredDecisions:
    values: list[Any] = [*row[:-1], msgspec.json.decode(row[-1])]
    return StoredDecisions(*values)


class StoredReplica(msgspec.Struct, frozen=True):
    id: str
    model: str
    version: str
    state: str
    created: float  # seconds since 1970, for display
    place: str = ""  # given by the substrate; empty until the replica is started
    epoch: str = ""
    segments: dict[str, float] = {}
    region: str = ""
    pool: str = ""
    price: float = 0.0  # per hour; 0: not recorded
    needs: Needs = Needs()


class Event(msgspec.Struct, frozen=True):
    """One decision or observation, with its explanation."""

    id: int
    at: float  # seconds since 1970
    kind: str
    model: str
    replica: str
    text: str
    facts: dict[str, Any] = {}


class FleetStore:
    def __init__(self, state_dir: Path) -> None:
        self._database = SqliteDatabase(state_dir / FILE, TIMEOUT_S)
        self.lease = Lease(self._database)

    async def open(self) -> None:
        await self._database.migrate("fleet_lease", LEASE_STEPS)
        await self._database.migrate("fleet", STEPS)

    async def close(self) -> None:
        await self._database.close()

    async def fleet_id(self) -> str:
        """Random; one for each state directory."""
        made = secrets.token_hex(6)
        await self._write(
            statement("INSERT INTO fleet_facts VALUES ('id', ?) ON CONFLICT (name) DO NOTHING", made)
        )
        rows = await self._database.ask("SELECT value FROM fleet_facts WHERE name = 'id'")
        return str(rows[0][0])

    async def fact(self, name: str) -> str:
        rows = await self._database.ask("SELECT value FROM fleet_facts WHERE name = ?", name)
        return str(rows[0][0]) if rows else ""

    async def set_fact(self, name: str, value: str) -> None:
        await self._put("fleet_facts", name, value)

    async def count(self, name: str) -> int:
        """The next number of this counter; no number is returned twice."""

        def work() -> Work[int]:
            yield (
                "INSERT INTO fleet_counters VALUES (?, 1) "
                "ON CONFLICT (name) DO UPDATE SET value = fleet_counters.value + 1",
                (name,),
            )
            rows = yield "SELECT value FROM fleet_counters WHERE name = ?", (name,)
            return int(rows[0][0])

        return await self._write(work())

    # ---- replicas and models ----

    async def replicas(self) -> list[StoredReplica]:
        rows = await self._database.ask(f"SELECT {_COLUMNS} FROM fleet_replicas ORDER BY created")
        return [_replica(row) for row in rows]

    async def save_replica(self, one: StoredReplica) -> None:
        first, last = msgspec.structs.astuple(one)[:7], (one.region, one.pool, one.price)
        segments, needs = (msgspec.json.encode(part).decode() for part in (one.segments, one.needs))
        values = (*first, segments, *last, needs)
        marks = ", ".join("?" * len(values))
        await self._write(
            statement(f"INSERT OR REPLACE INTO fleet_replicas ({_COLUMNS}) VALUES ({marks})", *values)
        )

    async def remove_replica(self, id: str) -> None:
        await self._write(statement("DELETE FROM fleet_replicas WHERE id = ?", id))

    async def models(self) -> dict[str, bytes]:
        """The state of each model, as JSON: see `model_state`."""
        rows = await self._database.ask("SELECT name, state FROM fleet_models")
        return {name: state.encode() for name, state in rows}

    async def save_model(self, name: str, state: bytes) -> None:
        await self._put("fleet_models", name, state.decode())

    # ---- events ----

    async def add_event(
        self, kind: str, text: str, kept: int, model: str, replica: str, facts: Mapping[str, Any]
    ) -> Event:
        at = time.time()
        shown = msgspec.json.encode(facts).decode()

        def work() -> Work[int]:
            rows = yield "SELECT COALESCE(MAX(id), 0) + 1 FROM fleet_events", ()
            number = int(rows[0][0])
            yield (
                "INSERT INTO fleet_events VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, at, kind, model, replica, text, shown),
            )
            yield "DELETE FROM fleet_events WHERE id <= ?", (number - kept,)
            return number

        return Event(await self._write(work()), at, kind, model, replica, text, dict(facts))

    async def events(self, after: int = 0, limit: int = 1000, model: str = "") -> Sequence[Event]:
        """The oldest `limit` events after a number; with after < 0, the newest -after events."""
        where, values = ("model = ? AND ", (model,)) if model else ("", ())
        columns = "id, at, kind, model, replica, text, facts"
        if after < 0:
            sql = f"SELECT {columns} FROM fleet_events WHERE {where}1 = 1 ORDER BY id DESC LIMIT ?"
            rows = (await self._database.ask(sql, *values, min(-after, limit)))[::-1]
        else:
            sql = f"SELECT {columns} FROM fleet_events WHERE {where}id > ? ORDER BY id LIMIT ?"
            rows = await self._database.ask(sql, *values, after, limit)
        return [_event(row) for row in rows]

    # ---- the autoscaler's decisions ----

    async def add_decisions(self, entry: StoredDecisions, kept: int) -> StoredDecisions:
        shown = msgspec.json.encode(entry.facts).decode()

        def work() -> Work[int]:
            rows = yield "SELECT COALESCE(MAX(id), 0) + 1 FROM fleet_decisions", ()
            number = int(rows[0][0])
            values = (number, entry.model, entry.first_at, entry.last_at, entry.count, entry.key, entry.text)
            yield "INSERT INTO fleet_decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, shown)
            yield "DELETE FROM fleet_decisions WHERE id <= ?", (number - kept,)
            return number

        return msgspec.structs.replace(entry, id=await self._write(work()))

    async def update_decisions(self, entry: StoredDecisions) -> None:
        shown = msgspec.json.encode(entry.facts).decode()
        sql = "UPDATE fleet_decisions SET last_at = ?, count = ?, text = ?, facts = ? WHERE id = ?"
        await self._write(statement(sql, entry.last_at, entry.count, entry.text, shown, entry.id))

    async def decisions(self, last: int, model: str = "") -> list[StoredDecisions]:
        """The newest entries, oldest first."""
        where, values = ("WHERE model = ? ", (model,)) if model else ("", ())
        columns = "id, model, first_at, last_at, count, same, text, facts"
        sql = f"SELECT {columns} FROM fleet_decisions {where}ORDER BY id DESC LIMIT ?"
        rows = await self._database.ask(sql, *values, last)
        return [_stored_decisions(row) for row in rows[::-1]]

    # ---- writing ----

    async def _put(self, table: str, name: str, value: Value) -> None:
        await self._write(statement(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", name, value))

    async def _write(self, work: Work[T]) -> T:
        return cast(T, await self._database.write(fenced(self.lease.fence, cast(Any, work))))


def _replica(row: Row) -> StoredReplica:
    *known, segments, region, pool, price, needs = row
    id, model, version, state, created, place, epoch = known
    spent, reserved = msgspec.json.decode(segments), msgspec.json.decode(needs, type=Needs)
    return StoredReplica(
        id, model, version, state, created, place, epoch, spent, region, pool, price, reserved
    )


def _event(row: Row) -> Event:
    id, at, kind, model, replica, text, facts = row
    return Event(id, at, kind, model, replica, text, msgspec.json.decode(facts))
