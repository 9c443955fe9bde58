"""ResponseStore: responses and their items in the state's SQLite file, bounded in number, bytes and age.

A conversation is a chain of responses, each with its input and output; using its last response refreshes the
age of all. After a restart, responses that were running are marked as failed before the first request.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ridgeline.server.errors import SERVER, ApiError
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.records.state import StateStore
from ridgeline.server.responses_api.bodies import Item, ResponseBody, ResponseError
from ridgeline.server.responses_api.items import Placed
from ridgeline.server.responses_api.protocol import MAX_ITEMS
from ridgeline.storage.database import Step
from ridgeline.storage.errors import StorageError

T = TypeVar("T")

# The tables, by version. A released step is never edited. Earlier servers made the same without a version.
VERSIONS: tuple[Step, ...] = (
    (
        """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, status TEXT NOT NULL, used_at REAL NOT NULL, bytes INTEGER NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at, bytes)",
        """CREATE TABLE IF NOT EXISTS response_items (
    response TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, is_output INTEGER NOT NULL,
    is_ours INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (response, place)
) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS response_items_by_id ON response_items (id)",
    ),
)
UNFINISHED = ("queued", "in_progress")
OUTPUT_PLACE = MAX_ITEMS  # output items come after every possible input item
RESTARTED = ResponseError("server_error", "the server was restarted before the answer was complete")
_ID = re.compile(r"resp_[0-9a-f]{48}")

_body = msgspec.json.Decoder(ResponseBody)
_item = msgspec.json.Decoder(Item)


@dataclass(frozen=True, slots=True)
class Limits:
    count: int
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class History:
    """The conversation up to and including a response, oldest first; its size decides where to process it."""

    items: list[Item]
    bytes: int


@dataclass(frozen=True, slots=True)
class ItemPage:
    items: list[Item]
    has_more: bool


class ResponseStore:
    """Every method is one transaction. A missing response is None or a 404, as the caller needs."""

    def __init__(self, state: StateStore, limits: Limits, max_history_bytes: int) -> None:
        self._state = state
        self._limits = limits
        self._max_history_bytes = max_history_bytes
        self._is_open = False

    async def add(self, body: ResponseBody, items: Sequence[Placed]) -> None:
        """A new response with its input, and its output if there is any."""

        def work(connection: sqlite3.Connection) -> None:
            now = time.time()
            row = (body.id, body.previous_response_id, body.status, now, 0, b"")
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            for place, given in enumerate(items):
                item = (body.id, place, given.item.id, 0, int(given.is_ours), encode(given.item))
                connection.execute("INSERT INTO response_items VALUES (?, ?, ?, ?, ?, ?)", item)
            _write(connection, body)
            self._bound(connection, now, body.id)

        await self._run(work)

    async def update(self, body: ResponseBody) -> None:
        """Store the response's current state; no effect if it was deleted."""
        await self._run(lambda connection: _write(connection, body))

    async def get(self, id: str) -> ResponseBody | None:
        return await self._run(lambda connection: self._get(connection, id)) if is_id(id) else None

    async def delete(self, id: str) -> bool:
        if not is_id(id):
            return False

        def work(connection: sqlite3.Connection) -> bool:
            found = self._get(connection, id) is not None
            _remove(connection, [id])
            return found

        return await self._run(work)

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """The stored items among the given ids, if the ids were made here."""

        def work(connection: sqlite3.Connection) -> dict[str, Item]:
            found = {}
            for id in set(ids):
                row = connection.execute(
                    "SELECT i.body FROM response_items i JOIN responses r ON r.id = i.response "
                    "WHERE i.id = ? AND i.is_ours = 1 AND r.used_at >= ? ORDER BY r.used_at DESC LIMIT 1",
                    (id, self._oldest()),
                ).fetchone()
                if row is not None:
                    found[id] = _item.decode(row[0])
            return found

        return await self._run(work)

    async def input_items(
        self, id: str, limit: int, newest_first: bool, after: str | None
    ) -> ItemPage | None:
        """A page of a response's own input; None if the response or `after` does not exist."""
        if not is_id(id):
            return None
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(connection: sqlite3.Connection) -> ItemPage | None:
            if self._get(connection, id) is None:
                return None
            start = OUTPUT_PLACE if newest_first else -1
            if after is not None:
                row = connection.execute(
                    "SELECT place FROM response_items WHERE response = ? AND id = ? AND is_output = 0",
                    (id, after),
                ).fetchone()
                if row is None:
                    return None
                start = row[0]
            rows = connection.execute(
                f"SELECT body FROM response_items WHERE response = ? AND is_output = 0 AND place {sign} ? "
                f"ORDER BY place {order} LIMIT ?",
                (id, start, limit + 1),
            ).fetchall()
            return ItemPage([_item.decode(row[0]) for row in rows[:limit]], len(rows) > limit)

        return await self._run(work)

    async def history(self, id: str) -> History:
        """The conversation up to and including a response. Raises 404 or 400 about `previous_response_id`."""
        return await self._run(lambda connection: self._history(connection, id))

    def _history(self, connection: sqlite3.Connection, id: str) -> History:
        chain: list[str] = []
        count = size = 0
        at: str | None = id
        while at is not None:
            row = (
                connection.execute(
                    "SELECT previous, status, bytes,"
                    " (SELECT COUNT(*) FROM response_items WHERE response = r.id)"
                    " FROM responses r WHERE id = ? AND used_at >= ?",
                    (at, self._oldest()),
                ).fetchone()
                if is_id(at)
                else None
            )
            if row is None:
                raise not_found(at, "previous_response_id", "" if at == id else f", which {id} goes on from")
            if row[1] not in ("completed", "incomplete"):
                message = f"previous_response_id: {at} is {row[1]}; only a finished one can be continued"
                raise ApiError(400, message, param="previous_response_id")
            chain.append(at)
            at, size, count = row[0], size + row[2], count + row[3]
            if size > self._max_history_bytes or count > MAX_ITEMS or len(chain) > MAX_ITEMS:
                message = (
                    f"previous_response_id: the conversation is longer than {MAX_ITEMS} items or "
                    f"{self._max_history_bytes} bytes; start a new one"
                )
                raise ApiError(400, message, param="previous_response_id", code="context_length_exceeded")
        now = time.time()
        connection.executemany("UPDATE responses SET used_at = ? WHERE id = ?", [(now, id) for id in chain])
        items = [
            _item.decode(row[0])
            for id in reversed(chain)
            for row in connection.execute(
                "SELECT body FROM response_items WHERE response = ? ORDER BY place", (id,)
            )
        ]
        return History(items, size)

    def _get(self, connection: sqlite3.Connection, id: str) -> ResponseBody | None:
        row = connection.execute(
            "SELECT body FROM responses WHERE id = ? AND used_at >= ?", (id, self._oldest())
        ).fetchone()
        if row is None:
            return None
        outputs = connection.execute(
            "SELECT body FROM response_items WHERE response = ? AND is_output = 1 ORDER BY place", (id,)
        )
        output = [_item.decode(output[0]) for output in outputs]
        return msgspec.structs.replace(_body.decode(row[0]), output=output)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if not self._is_open:  # a separate transaction: a refused request rolls back only its own
                await self._state.migrate("responses", VERSIONS)
                await self._state.run(self._open)
            return await self._state.run(work)
        except (sqlite3.Error, StorageError) as error:
            message = f"the server's store of responses cannot be used now: {error}"
            raise ApiError(500, message, type=SERVER, code="internal_error") from error

    def _open(self, connection: sqlite3.Connection) -> None:
        """In the state's one thread: concurrent callers wait and find it done."""
        if self._is_open:
            return
        unfinished = connection.execute(f"SELECT body FROM responses WHERE status IN {UNFINISHED}").fetchall()
        for (raw,) in unfinished:
            _write(connection, msgspec.structs.replace(_body.decode(raw), status="failed", error=RESTARTED))
        self._bound(connection, time.time(), "")
        self._is_open = True

    def _oldest(self) -> float:
        return time.time() - self._limits.age_s

    def _bound(self, connection: sqlite3.Connection, now: float, kept: str) -> None:
        """Remove expired responses, then the least recently used until the rest fits; never the newest."""
        too_old = connection.execute(
            "SELECT id FROM responses WHERE used_at < ?", (now - self._limits.age_s,)
        ).fetchall()
        _remove(connection, [row[0] for row in too_old])
        count, size = connection.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM responses").fetchone()
        if count <= self._limits.count and size <= self._limits.bytes:
            return
        dropped = []
        oldest = connection.execute(
            f"SELECT id, bytes FROM responses WHERE id != ? AND status NOT IN {UNFINISHED} ORDER BY used_at",
            (kept,),
        )
        for id, bytes in oldest:
            if count <= self._limits.count and size <= self._limits.bytes:
                break
            dropped.append(id)
            count, size = count - 1, size - bytes
        _remove(connection, dropped)


def is_id(id: str) -> bool:
    """Whether a client's text can be the id of a response."""
    return _ID.fullmatch(id) is not None


def not_found(id: str, field: str | None, more: str = "") -> ApiError:
    where = f"{field}: " if field else ""
    return ApiError(
        404, f"{where}no response {id[:64]!r}{more} is stored here", param=field, code="not_found"
    )


def _write(connection: sqlite3.Connection, body: ResponseBody) -> None:
    """Write the response's row and its output items."""
    bare = encode(msgspec.structs.replace(body, output=[]))
    rows = [
        (body.id, OUTPUT_PLACE + place, item.id, 1, 1, encode(item)) for place, item in enumerate(body.output)
    ]
    connection.execute("DELETE FROM response_items WHERE response = ? AND is_output = 1", (body.id,))
    inputs = connection.execute(
        "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM response_items WHERE response = ?", (body.id,)
    ).fetchone()[0]
    size = inputs + len(bare) + sum(len(row[-1]) for row in rows)
    changed = connection.execute(
        "UPDATE responses SET status = ?, bytes = ?, body = ? WHERE id = ?",
        (body.status, size, bare, body.id),
    )
    if changed.rowcount:
        connection.executemany("INSERT INTO response_items VALUES (?, ?, ?, ?, ?, ?)", rows)


def _remove(connection: sqlite3.Connection, ids: Sequence[str]) -> None:
    for id in ids:
        connection.execute("DELETE FROM response_items WHERE response = ?", (id,))
        connection.execute("DELETE FROM responses WHERE id = ?", (id,))
