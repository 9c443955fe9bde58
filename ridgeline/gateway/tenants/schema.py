"""The tables of tenants, by version, in either dialect. A released version is never edited: add the next."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.storage.database import Dialect, Step

COMPONENT = "tenants"

_TABLES = (
    # One row that every change of keys and teams updates first: it gives the change its version, and makes
    # changes wait for one another, so that versions become visible in their order.
    "CREATE TABLE ridgeline_policy (id BIGINT PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL,"
    " epoch BIGINT NOT NULL)",
    "INSERT INTO ridgeline_policy (id, version, epoch) VALUES (1, 1, 1)",
    # Keys and teams deleted after the version `epoch`; for older versions everything must be read again.
    "CREATE TABLE ridgeline_gone (id TEXT PRIMARY KEY, version BIGINT NOT NULL)",
    "CREATE INDEX ridgeline_gone_version ON ridgeline_gone (version)",
    "CREATE TABLE ridgeline_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE ridgeline_teams (id TEXT PRIMARY KEY, version BIGINT NOT NULL, name TEXT NOT NULL UNIQUE,"
    " created_ms BIGINT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX ridgeline_teams_version ON ridgeline_teams (version)",
    "CREATE TABLE ridgeline_keys (id TEXT PRIMARY KEY, version BIGINT NOT NULL, name TEXT NOT NULL,"
    " team TEXT NOT NULL, created_ms BIGINT NOT NULL, revoked BIGINT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX ridgeline_keys_version ON ridgeline_keys (version)",
    "CREATE INDEX ridgeline_keys_team ON ridgeline_keys (team)",
    "CREATE INDEX ridgeline_keys_name ON ridgeline_keys (name)",
    "CREATE TABLE ridgeline_secrets (digest TEXT PRIMARY KEY,"
    " key_id TEXT NOT NULL REFERENCES ridgeline_keys (id) ON DELETE CASCADE,"
    " created_ms BIGINT NOT NULL, until_ms BIGINT)",
    "CREATE INDEX ridgeline_secrets_key ON ridgeline_secrets (key_id)",
    "CREATE TABLE ridgeline_owned (object_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, upstream TEXT NOT NULL,"
    " kind TEXT NOT NULL, created_ms BIGINT NOT NULL, pending BIGINT NOT NULL, meta TEXT NOT NULL)",
    "CREATE INDEX ridgeline_owned_tenant ON ridgeline_owned (tenant, kind, created_ms)",
    "CREATE INDEX ridgeline_owned_pending ON ridgeline_owned (kind, created_ms) WHERE pending = 1",
)

_AUDIT = (
    "CREATE TABLE ridgeline_audit (id {identity}, at_ms BIGINT NOT NULL, who TEXT NOT NULL,"
    " action TEXT NOT NULL, target TEXT NOT NULL, address TEXT NOT NULL, outcome TEXT NOT NULL,"
    " state_before TEXT, state_after TEXT)"
)
_AUDIT_INDEX = "CREATE INDEX ridgeline_audit_at ON ridgeline_audit (at_ms)"

# Rows of the audit log cannot be changed, not even with the store's password.
_SQLITE_APPEND_ONLY = tuple(
    f"CREATE TRIGGER ridgeline_audit_no_{verb.lower()} BEFORE {verb} ON ridgeline_audit"
    " BEGIN SELECT RAISE(ABORT, 'the audit log is append only'); END"
    for verb in ("UPDATE", "DELETE")
)
_POSTGRES_APPEND_ONLY = (
    "CREATE FUNCTION ridgeline_audit_append_only() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'the audit log is append only'; END $$",
    "CREATE TRIGGER ridgeline_audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ridgeline_audit"
    " FOR EACH STATEMENT EXECUTE FUNCTION ridgeline_audit_append_only()",
)


def steps(dialect: Dialect) -> Sequence[Step]:
    if dialect == "sqlite":
        identity, append_only = "INTEGER PRIMARY KEY AUTOINCREMENT", _SQLITE_APPEND_ONLY
    else:
        identity, append_only = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", _POSTGRES_APPEND_ONLY
    return ((*_TABLES, _AUDIT.format(identity=identity), _AUDIT_INDEX, *append_only),)
