"""The audit log: administrator, action, time, address, and state before and after. Never a secret.

A row is written in the transaction of its change: neither exists without the other.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from ridgeline.storage.database import Row, Work, statement

Outcome = Literal["done", "refused", "failed"]


class Actor(msgspec.Struct, frozen=True):
    """The author of a change: the name of the admin key, and the client's address."""

    who: str
    address: str


class AuditEntry(msgspec.Struct, frozen=True):
    id: int
    at_ms: int
    who: str
    action: str
    target: str
    address: str
    outcome: str
    before: msgspec.Raw | None
    after: msgspec.Raw | None


def record(
    actor: Actor,
    action: str,
    target: str,
    *,
    before: Any = None,
    after: Any = None,
    outcome: Outcome = "done",
) -> Work[None]:
    yield (
        "INSERT INTO ridgeline_audit"
        " (at_ms, who, action, target, address, outcome, state_before, state_after)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            int(time.time() * 1000),
            actor.who,
            action,
            target,
            actor.address,
            outcome,
            _document(before),
            _document(after),
        ),
    )


def entries(since_ms: int | None, after: int | None, limit: int) -> Work[list[AuditEntry]]:
    """In their order. With neither bound the newest, else the first ones at or after `since_ms`, with ids
    greater than `after`.
    """
    columns = "SELECT id, at_ms, who, action, target, address, outcome, state_before, state_after"
    if since_ms is None and after is None:
        newest = yield from statement(f"{columns} FROM ridgeline_audit ORDER BY id DESC LIMIT ?", limit)
        return [_entry(row) for row in reversed(newest)]
    rows = yield from statement(
        f"{columns} FROM ridgeline_audit WHERE at_ms >= ? AND id > ? ORDER BY id LIMIT ?",
        since_ms or 0,
        after or 0,
        limit,
    )
    return [_entry(row) for row in rows]


def _document(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _entry(row: Row) -> AuditEntry:
    *fields, before, after = row
    return AuditEntry(
        *fields, *(None if text is None else msgspec.Raw(text.encode()) for text in (before, after))
    )
