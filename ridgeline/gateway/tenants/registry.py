"""Registry: creates and changes keys and teams, each change with its audit record in one transaction.

Called by the admin app with checked fields; conditions on the store's content (a team that must exist, a name
that is taken) are checked here, inside the transaction.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.gateway.errors import BadRequest, GatewayError, NotFound
from ridgeline.gateway.tenants import audit
from ridgeline.gateway.tenants.audit import Actor, AuditEntry
from ridgeline.gateway.tenants.digest import digester, new_secret
from ridgeline.gateway.tenants.keys import Key, Team
from ridgeline.gateway.tenants.store import Store
from ridgeline.storage.database import Row, Work, statement

MAX_LIVE_SECRETS = 4  # of one key: the current one and those in their grace
MAX_TEAMS = 10_000
GONE_VERSIONS = 10_000  # number of changes for which deletions are kept one by one

_key_of = msgspec.json.Decoder(Key).decode
_team_of = msgspec.json.Decoder(Team).decode


class KeyRecord(msgspec.Struct, frozen=True):
    """A key for the admin API."""

    key: Key
    created_ms: int
    old_secrets_until_ms: tuple[int, ...] = ()  # rotated secrets that are still valid


class TeamRecord(msgspec.Struct, frozen=True):
    team: Team
    created_ms: int


class Conflict(GatewayError):
    status, type, code = 409, "invalid_request_error", "conflict"


class Registry:
    def __init__(self, store: Store) -> None:
        self._store = store

    # ---- keys ----

    async def create_key(self, make: Callable[[str], Key], by: Actor) -> tuple[KeyRecord, str]:
        """`make` gets the new key's id. The secret is returned here and never again."""
        await self._store.prepare()
        secret = new_secret()
        key = make("key_" + secrets.token_hex(10))
        work = _create_key(key, self._digest(secret), self._store.config.max_keys, by)
        return await self._store.write(work), secret

    async def update_key(self, id: str, change: Callable[[Key], Key], by: Actor) -> KeyRecord:
        return await self._store.write(_update_key(id, change, by))

    async def rotate_key(self, id: str, grace_s: float, by: Actor) -> tuple[KeyRecord, str]:
        """A new secret; every secret before it ends after the grace, or when it would have ended."""
        await self._store.prepare()
        secret = new_secret()
        return await self._store.write(_rotate_key(id, self._digest(secret), grace_s, by)), secret

    async def revoke_key(self, id: str, by: Actor, end_requests: bool = False) -> KeyRecord:
        """end_requests: also end running requests, even if the key is already revoked."""
        return await self._store.write(_revoke_key(id, by, end_requests))

    async def delete_key(self, id: str, by: Actor) -> None:
        """Delete a revoked key with its name and limits."""
        await self._store.write(_delete_key(id, by))

    async def key(self, id: str) -> KeyRecord:
        return await self._store.read(_key(id))

    async def keys(
        self, *, team: str | None, name: str | None, with_revoked: bool, after: str, limit: int
    ) -> list[KeyRecord]:
        """Ordered by id, after the id `after`."""
        return await self._store.read(_keys(team, name, with_revoked, after, limit))

    # ---- teams ----

    async def create_team(self, make: Callable[[str], Team], by: Actor) -> TeamRecord:
        return await self._store.write(_create_team(make("team_" + secrets.token_hex(10)), by))

    async def update_team(self, id: str, change: Callable[[Team], Team], by: Actor) -> TeamRecord:
        return await self._store.write(_update_team(id, change, by))

    async def delete_team(self, id: str, by: Actor) -> None:
        await self._store.write(_delete_team(id, by))

    async def team(self, id: str) -> TeamRecord:
        return await self._store.read(_team(id))

    async def teams(self, *, name: str | None, after: str, limit: int) -> list[TeamRecord]:
        return await self._store.read(_teams(name, after, limit))

    # ---- audit ----

    async def record(
        self, by: Actor, action: str, target: str, outcome: audit.Outcome, after: Any = None
    ) -> None:
        """Record an action that changes nothing in the store, or was refused."""
        await self._store.write(audit.record(by, action, target, after=after, outcome=outcome))

    async def audit(self, since_ms: int | None, after: int | None, limit: int) -> list[AuditEntry]:
        return await self._store.read(audit.entries(since_ms, after, limit))

    def _digest(self, secret: str) -> str:
        digest = digester(self._store.server_secret)(secret)
        assert digest is not None
        return digest.hex()


# ---- transactions; each that changes something begins with the policy's row ----


def _next_version() -> Work[int]:
    sql = "UPDATE ridgeline_policy SET version = version + 1 WHERE id = 1 RETURNING version"
    ((version,),) = yield from statement(sql)
    return int(version)


def _gone(id: str, version: int) -> Work[None]:
    """Record a deletion for workers. A worker that is further behind reads everything again."""
    yield "INSERT INTO ridgeline_gone (id, version) VALUES (?, ?)", (id, version)
    forgotten = version - GONE_VERSIONS
    yield "UPDATE ridgeline_policy SET epoch = ? WHERE id = 1 AND epoch < ?", (forgotten, forgotten)
    yield "DELETE FROM ridgeline_gone WHERE version <= ?", (forgotten,)


def _create_key(key: Key, digest: str, max_keys: int, by: Actor) -> Work[KeyRecord]:
    version = yield from _next_version()
    ((count,),) = yield "SELECT count(*) FROM ridgeline_keys", ()
    if count >= max_keys:
        raise Conflict(f"the store has {count} keys, the limit; delete revoked keys, or raise store.max_keys")
    yield from _check_team(key.team)
    now = _now_ms()
    yield (
        "INSERT INTO ridgeline_keys (id, version, name, team, created_ms, revoked, document)"
        " VALUES (?, ?, ?, ?, ?, 0, ?)",
        (key.id, version, key.name, key.team, now, _text(key)),
    )
    yield from _add_secret(key.id, digest, now)
    yield from audit.record(by, "key.create", key.id, after=key)
    return KeyRecord(key, now)


def _update_key(id: str, change: Callable[[Key], Key], by: Actor) -> Work[KeyRecord]:
    version = yield from _next_version()
    before = yield from _usable_key(id)
    key = change(before.key)
    if key.team != before.key.team:
        yield from _check_team(key.team)
    yield from _put_key(key, version)
    yield from audit.record(by, "key.update", id, before=before.key, after=key)
    return KeyRecord(key, before.created_ms, before.old_secrets_until_ms)


def _rotate_key(id: str, digest: str, grace_s: float, by: Actor) -> Work[KeyRecord]:
    version = yield from _next_version()
    before = yield from _usable_key(id)
    now = _now_ms()
    until = now + int(grace_s * 1000)
    yield "DELETE FROM ridgeline_secrets WHERE key_id = ? AND until_ms <= ?", (id, now)
    live = yield "SELECT count(*) FROM ridgeline_secrets WHERE key_id = ?", (id,)
    if grace_s > 0 and live[0][0] >= MAX_LIVE_SECRETS:
        raise Conflict(f"{live[0][0]} secrets of this key are still valid: wait, or rotate with grace_s 0")
    yield (
        "UPDATE ridgeline_secrets SET until_ms = ? WHERE key_id = ? AND (until_ms IS NULL OR until_ms > ?)",
        (until, id, until),
    )
    yield from _add_secret(id, digest, now)
    yield from _put_key(before.key, version)
    yield from audit.record(by, "key.rotate", id, after={"grace_s": grace_s})
    return (yield from _key(id))


def _revoke_key(id: str, by: Actor, end_requests: bool) -> Work[KeyRecord]:
    version = yield from _next_version()
    before = yield from (_key(id) if end_requests else _usable_key(id))
    revoked_at = before.key.revoked_at or time.time()
    key = msgspec.structs.replace(before.key, revoked_at=revoked_at, ends_requests=end_requests)
    yield from _put_key(key, version)
    yield from audit.record(by, "key.revoke", id, before=before.key, after=key)
    return KeyRecord(key, before.created_ms)


def _delete_key(id: str, by: Actor) -> Work[None]:
    version = yield from _next_version()
    before = yield from _key(id)
    if before.key.revoked_at is None:
        raise Conflict("only a revoked key can be deleted; revoke it first")
    yield "DELETE FROM ridgeline_secrets WHERE key_id = ?", (id,)
    yield "DELETE FROM ridgeline_keys WHERE id = ?", (id,)
    yield from _gone(id, version)
    yield from audit.record(by, "key.delete", id, before=before.key)


def _create_team(team: Team, by: Actor) -> Work[TeamRecord]:
    version = yield from _next_version()
    ((count,),) = yield "SELECT count(*) FROM ridgeline_teams", ()
    if count >= MAX_TEAMS:
        raise Conflict(f"the store has {count} teams, its limit")
    yield from _check_team_name(team)
    now = _now_ms()
    yield (
        "INSERT INTO ridgeline_teams (id, version, name, created_ms, document) VALUES (?, ?, ?, ?, ?)",
        (team.id, version, team.name, now, _text(team)),
    )
    yield from audit.record(by, "team.create", team.id, after=team)
    return TeamRecord(team, now)


def _update_team(id: str, change: Callable[[Team], Team], by: Actor) -> Work[TeamRecord]:
    version = yield from _next_version()
    before = yield from _team(id)
    team = change(before.team)
    yield from _check_team_name(team)
    yield (
        "UPDATE ridgeline_teams SET version = ?, name = ?, document = ? WHERE id = ?",
        (version, team.name, _text(team), id),
    )
    yield from audit.record(by, "team.update", id, before=before.team, after=team)
    return TeamRecord(team, before.created_ms)


def _delete_team(id: str, by: Actor) -> Work[None]:
    version = yield from _next_version()
    before = yield from _team(id)
    ((count,),) = yield "SELECT count(*) FROM ridgeline_keys WHERE team = ? AND revoked = 0", (id,)
    if count:
        raise Conflict(f"{count} keys belong to this team: revoke them or move them first")
    yield "DELETE FROM ridgeline_teams WHERE id = ?", (id,)
    yield from _gone(id, version)
    yield from audit.record(by, "team.delete", id, before=before.team)


# ---- rows ----


def _key(id: str) -> Work[KeyRecord]:
    rows = yield "SELECT document, created_ms FROM ridgeline_keys WHERE id = ?", (id,)
    if not rows:
        raise NotFound("no key has this id")
    return (yield from _records(rows))[0]


def _keys(
    team: str | None, name: str | None, with_revoked: bool, after: str, limit: int
) -> Work[list[KeyRecord]]:
    rows = yield from statement(
        "SELECT document, created_ms FROM ridgeline_keys WHERE id > ? AND revoked <= ?"
        " AND (CAST(? AS TEXT) IS NULL OR team = ?) AND (CAST(? AS TEXT) IS NULL OR name = ?)"
        " ORDER BY id LIMIT ?",
        *(after, int(with_revoked), team, team, name, name, limit),
    )
    return (yield from _records(rows))


def _records(rows: list[Row]) -> Work[list[KeyRecord]]:
    """With the ends of rotated secrets that are still valid: few, so they are read for all keys."""
    graces: dict[str, list[int]] = {}
    for key_id, until_ms in (
        yield (
            "SELECT key_id, until_ms FROM ridgeline_secrets WHERE until_ms > ? ORDER BY until_ms",
            (_now_ms(),),
        )
    ):
        graces.setdefault(key_id, []).append(until_ms)
    keys = [(_key_of(document), created_ms) for document, created_ms in rows]
    return [KeyRecord(key, created_ms, tuple(graces.get(key.id, ()))) for key, created_ms in keys]


def _usable_key(id: str) -> Work[KeyRecord]:
    record = yield from _key(id)
    if record.key.revoked_at is not None:
        raise Conflict("the key is revoked permanently; create another")
    return record


def _put_key(key: Key, version: int) -> Work[None]:
    revoked = int(key.revoked_at is not None)
    yield (
        "UPDATE ridgeline_keys SET version = ?, name = ?, team = ?, revoked = ?, document = ? WHERE id = ?",
        (version, key.name, key.team, revoked, _text(key), key.id),
    )


def _add_secret(key_id: str, digest: str, now_ms: int) -> Work[None]:
    yield (
        "INSERT INTO ridgeline_secrets (digest, key_id, created_ms, until_ms) VALUES (?, ?, ?, NULL)",
        (digest, key_id, now_ms),
    )


def _team(id: str) -> Work[TeamRecord]:
    rows = yield "SELECT document, created_ms FROM ridgeline_teams WHERE id = ?", (id,)
    if not rows:
        raise NotFound("no team has this id")
    return TeamRecord(_team_of(rows[0][0]), rows[0][1])


def _teams(name: str | None, after: str, limit: int) -> Work[list[TeamRecord]]:
    rows = yield from statement(
        "SELECT document, created_ms FROM ridgeline_teams WHERE id > ?"
        " AND (CAST(? AS TEXT) IS NULL OR name = ?) ORDER BY id LIMIT ?",
        *(after, name, name, limit),
    )
    return [TeamRecord(_team_of(document), created_ms) for document, created_ms in rows]


def _check_team(id: str) -> Work[None]:
    if id and not (yield "SELECT 1 FROM ridgeline_teams WHERE id = ?", (id,)):
        raise BadRequest("team: no team has this id", param="team", code="unknown_team")


def _check_team_name(team: Team) -> Work[None]:
    taken = yield "SELECT 1 FROM ridgeline_teams WHERE name = ? AND id <> ?", (team.name, team.id)
    if taken:
        raise Conflict("name: another team has this name", param="name", code="name_taken")


def _text(value: Key | Team) -> str:
    return msgspec.json.encode(value).decode()


def _now_ms() -> int:
    return int(time.time() * 1000)
