"""Ledger: books the requests of a worker's pipeline.

`open` before the upstream request, `close` once, when the request has ended: each is one append to the
worker's write-ahead file, and nothing else happens on the event loop. The mover copies rows to the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path

import msgspec

from ridgeline.gateway.accounting.config import LedgerConfig
from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.lost import CostOf, LostRequests, UsageOf
from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.store.journal import Journal
from ridgeline.gateway.accounting.store.mover import Mover
from ridgeline.gateway.accounting.store.places import JOURNALS, store_at
from ridgeline.gateway.accounting.store.reader import LedgerReader, usage_reader
from ridgeline.gateway.accounting.store.table import LedgerStore
from ridgeline.gateway.errors import Unavailable

_SAY_AGAIN_S = 10.0
_CATCH_UP_S = 5.0

logger = logging.getLogger("ridgeline.gateway.ledger")


class LedgerState(msgspec.Struct, frozen=True):
    """For metrics and the admin API. Rows of this worker since it started."""

    written: int
    moved: int
    moved_for_dead: int  # rows of workers that died, which this one took over
    waiting_bytes: int  # of write-ahead files, the one that is written included
    held: int  # in memory, because they could not be written to a file
    dropped: int  # neither in a file nor in memory: each one is logged
    refused: int
    damaged: int
    taken_over: int
    store_away_s: float
    trouble: str


class Ledger:
    """One per worker. Every call but `start` and `stop` is synchronous, and takes a few microseconds."""

    def __init__(
        self,
        config: LedgerConfig,
        state_dir: Path,
        worker: str,
        *,
        store_url: str = "",
        cost_of: CostOf | None = None,
        usage_of: UsageOf | None = None,
        store: LedgerStore | None = None,
    ) -> None:
        self._config = config
        self._worker = worker
        self._root = state_dir / JOURNALS
        self._store = store or store_at(store_url, state_dir, config.store_timeout_s)
        self._cost_of, self._usage_of = cost_of, usage_of
        self._reader: LedgerReader = usage_reader(store_url, state_dir, config.store_timeout_s)
        self._held: deque[LedgerRow] = deque()
        self._written = self._dropped = 0
        self._stopped = False
        self._write_failed = False  # the last write to the write-ahead file
        self._said_at = float("-inf")

    async def start(self) -> None:
        """Create the write-ahead file and begin to move rows. Does not fail if the store is unreachable."""
        config = self._config
        try:
            self._journal = Journal(self._root, self._worker, config.segment_bytes, config.fsync)
        except OSError as error:
            raise LedgerError(
                f"{self._root}: cannot create a write-ahead file there: {error.strerror}; "
                "set state_dir to a writable folder"
            ) from error
        loop = asyncio.get_running_loop()
        lost = LostRequests(config.ask_lost_s, self._cost_of, self._usage_of, loop)
        self._mover = Mover(config, self._root, self._store, self._journal, self._held, lost)
        self._mover.start()

    async def stop(self) -> bool:
        """Call after every request is closed. False: rows stay in files; the next worker moves them."""
        self._journal.end()
        await self._reader.close()
        is_empty = await asyncio.to_thread(self._mover.stop, self._config.stop_s)
        self._stopped = True
        return is_empty

    def open(self, opening: Opening) -> None:
        """Call before each upstream request.

        Unavailable if it cannot be written and the config refuses requests then.
        """
        try:
            if self._is_over_bound():
                raise OSError(28, "max_bytes of write-ahead files are full")
            self._journal.append_opening(opening)
            self._write_failed = False
        except OSError as error:
            self._write_failed = not self._is_over_bound()
            self._say("a request's opening", error)
            if self._config.when_full == "refuse":
                self._journal.forget(opening.request_id)
                message = "the ledger cannot book requests at the moment"
                raise Unavailable(message, code="ledger_unavailable", headers={"retry-after": "5"}) from None

    def close(self, row: LedgerRow) -> None:
        """The one row of a request. Never raises."""
        self._written += 1
        try:
            self._journal.append_row(row)
            self._write_failed = False
        except OSError as error:
            self._write_failed = True
            self._hold(row, error)

    def unavailable(self) -> str:
        """Why new requests cannot be booked; empty if they can. For /ready.

        A failed write is retried here: without traffic nothing else would notice free disk space.
        With `when_full = "serve"` the rows in memory count instead, until memory_rows of them are held.
        """
        if self._write_failed:
            try:
                self._journal.try_write()
                self._write_failed = False
            except OSError as error:
                reason = f"its write-ahead file cannot be written: {error.strerror or error}"
                return reason if self._refuses() else ""
        if self._is_over_bound() and self._refuses():
            return f"its write-ahead files hold more than max_bytes ({self._config.max_bytes} bytes)"
        return ""

    def _is_over_bound(self) -> bool:
        return self._journal.written - self._mover.removed_bytes > self._config.max_bytes

    def _refuses(self) -> bool:
        return self._config.when_full == "refuse" or len(self._held) >= self._config.memory_rows

    async def spent(self, kind: str, id: str, since_ms: int) -> int:
        """Picodollars of a key, team or model since then, from the store, other gateways included.

        Waits for a while until files of a crash have been read. Unavailable: the store is unreachable.
        """
        await self._catch_up()
        return await self._reader.spent(kind, id, since_ms)

    async def has(self, request_id: str) -> bool:
        """Whether the store has this row, also of a dead worker. Unavailable: the store is unreachable."""
        await self._catch_up()
        return await self._reader.row(request_id) is not None

    async def _catch_up(self) -> None:
        until = time.monotonic() + _CATCH_UP_S
        while not self._mover.caught_up and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def state(self) -> LedgerState:
        mover = self._mover
        away = mover.away_since
        return LedgerState(
            written=self._written,
            moved=mover.moved,
            moved_for_dead=mover.moved_for_dead,
            waiting_bytes=self._journal.written - mover.removed_bytes,
            held=len(self._held),
            dropped=self._dropped,
            refused=mover.refused,
            damaged=mover.damaged,
            taken_over=mover.taken_over,
            store_away_s=0.0 if away is None else time.monotonic() - away,
            trouble=mover.trouble,
        )

    def _hold(self, row: LedgerRow, error: OSError) -> None:
        # If new requests are refused, only running requests add rows with a cost: keep all.
        bounded = self._config.when_full == "serve" or not (row.tokens_in or row.tokens_out)
        if self._stopped or (bounded and len(self._held) >= self._config.memory_rows):
            self._dropped += 1
            logger.critical("no space left for a row of the ledger; dropped: %s", msgspec.json.encode(row))
            return
        self._held.append(row)
        self._say("a row", error)

    def _say(self, what: str, error: OSError) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            logger.critical("%s could not be written to the ledger's file: %s", what, error.strerror or error)
