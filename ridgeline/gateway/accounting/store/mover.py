"""Mover: copies rows from write-ahead files into the store, in a thread beside the event loop.

It follows its own worker's journal and takes over those of dead workers. A row leaves its file only when the
store has it; the store ignores rows that it has, so a row that is sent twice counts once. Memory holds one
batch per journal, even while the store is unreachable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.gateway.accounting.config import LedgerConfig
from ridgeline.gateway.accounting.errors import RowsRefused, StoreAway
from ridgeline.gateway.accounting.lost import LostRequests, LostRows
from ridgeline.gateway.accounting.row import LedgerRow, Opening
from ridgeline.gateway.accounting.store.journal import (
    Journal,
    JournalReader,
    last_alive_ms,
    orphans,
    remove_folder,
)
from ridgeline.gateway.accounting.store.records import Damaged, value_of
from ridgeline.gateway.accounting.store.table import LedgerStore

REFUSED_FILE = "refused.jsonl"
_FIRST_PAUSE_S = 0.1
_SAY_AGAIN_S = 60.0
_YIELD_EVERY = 64  # rows decoded before the event loop's thread may run
_REMOVE_ROWS = 1000
_RETENTION_S = 3600.0
_DAY_MS = 86_400_000

logger = logging.getLogger("ridgeline.gateway.ledger")


class Source:
    """A journal that is being copied: the reader, and the batch that is not yet committed."""

    def __init__(self, reader: JournalReader, lock: int = -1) -> None:
        self.reader = reader
        self.batch: list[LedgerRow] = []
        self.lock = lock  # of a dead worker's journal
        self.open: dict[str, Opening] = {}  # of a dead worker: openings without a row
        self.asked: LostRows | None = None  # whose usage is being requested

    @property
    def orphaned(self) -> bool:
        return self.lock >= 0


class Mover:
    """`start`, then `stop` once nothing more is written to the journal. Counters are read from any thread."""

    def __init__(
        self,
        config: LedgerConfig,
        root: Path,
        store: LedgerStore,
        journal: Journal,
        held: deque[LedgerRow],
        lost: LostRequests,
    ) -> None:
        self._config, self._root, self._store, self._journal = config, root, store, journal
        self._held = held  # rows that could not be written to a file
        self._lost = lost
        self._own = Source(JournalReader(journal.folder, journal))
        self._taken: list[Source] = []
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self.moved = 0  # this worker's rows, committed
        self.moved_for_dead = 0  # dead workers' rows, committed; includes rows that the store already had
        self.refused = 0  # rows that the store rejects, in `refused.jsonl`
        self.damaged = 0  # lines of files that could not be read
        self.taken_over = 0  # journals of dead workers, finished
        self.caught_up = False  # the store has all rows that dead workers had left at the start
        self.away_since: float | None = None  # monotonic seconds: the store is unreachable since then
        self.trouble = ""
        self._said_at = 0.0
        self._retention_at = 0.0
        self._orphans_at = 0.0

    @property
    def removed_bytes(self) -> int:
        return self._own.reader.removed

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Move the rest within the time limit. False: rows stay in the files."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._journal.folder.exists()

    # ---- the thread ----

    def _run(self) -> None:
        longest_s = self._config.retry_s
        wait_s = first_s = min(_FIRST_PAUSE_S, longest_s)
        while True:
            last = self._stopping  # checked before the files are read: they are then complete
            try:
                busy = self._round()
                self._is_back()
                wait_s = first_s
                if busy:
                    continue
                if last:
                    break
                self._wake.wait(self._config.flush_ms / 1000)
            except StoreAway as error:
                self._is_away(error)
                if last:
                    break
                self._wake.wait(wait_s)
                wait_s = min(wait_s * 2, longest_s)
            except Exception:  # rows are still in their files: log it and try again
                logger.exception("the ledger's mover failed; trying again")
                if last:
                    break
                self._wake.wait(longest_s)
        self._leave()

    def _round(self) -> bool:
        """One batch of every journal; whether there may be more at once."""
        self._journal.sync()
        self._journal.mark_alive()
        busy = self._move_held()
        busy = self._move(self._own) or busy
        for source in list(self._taken):
            busy = self._move(source) or busy
        if not self._stopping:
            busy = self._take_over() or busy
            self.caught_up = self.caught_up or all(source.reader.exhausted for source in self._taken)
            busy = self._remove_old() or busy
        return busy

    def _move(self, source: Source) -> bool:
        if not source.batch:
            source.batch = self._rows_of(source.reader.next_lines(), source)
        if source.batch:
            self._commit(source.batch)
            if source.orphaned:
                self.moved_for_dead += len(source.batch)
            else:
                self.moved += len(source.batch)
            source.batch = []
        if not source.orphaned:
            source.reader.remove_passed()
            return source.reader.is_behind  # else rows collect until the next flush
        if source.reader.exhausted:
            self._finish(source)
            return False
        return True

    def _rows_of(self, lines: Sequence[bytes], source: Source) -> list[LedgerRow]:
        rows = []
        for number, line in enumerate(lines):
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                time.sleep(0)
            if line[:1] == b"O" and not source.orphaned:
                continue
            try:
                value = value_of(line)
            except Damaged as error:
                self.damaged += 1
                logger.error("skipped a damaged record of %s: %s", source.reader.folder.name, error)
                continue
            if isinstance(value, LedgerRow):
                source.open.pop(value.request_id, None)
                rows.append(value)
            else:
                source.open[value.request_id] = value
        return rows

    def _commit(self, rows: Sequence[LedgerRow]) -> None:
        try:
            self._store.insert(rows)
        except RowsRefused:
            for row in rows:
                self._commit_alone(row)

    def _commit_alone(self, row: LedgerRow) -> None:
        try:
            self._store.insert([row])
        except RowsRefused as error:
            self.refused += 1
            logger.error("the store rejected the row of %s; it is in %s", row.request_id, REFUSED_FILE)
            entry = msgspec.json.encode({"why": str(error), "row": row}) + b"\n"
            with (self._root / REFUSED_FILE).open("ab") as file:
                file.write(entry)

    def _move_held(self) -> bool:
        """Write rows that no file could take directly to the store."""
        some = [self._held[index] for index in range(min(len(self._held), 500))]
        if some:
            self._commit(some)
            self.moved += len(some)
            for _ in some:
                self._held.popleft()
        return bool(some)

    # ---- journals of dead workers ----

    def _take_over(self) -> bool:
        if time.monotonic() < self._orphans_at:
            return False
        self._orphans_at = time.monotonic() + self._config.takeover_s
        known = {self._journal.folder} | {source.reader.folder for source in self._taken}
        found = [Source(JournalReader(folder), lock) for folder, lock in orphans(self._root, known)]
        self._taken += found
        return bool(found)

    def _finish(self, source: Source) -> None:
        """All its rows are in the store. Openings without a row are requests that died with the worker."""
        if source.open and source.asked is None:
            there = self._store.known(list(source.open))
            lost = [one for one in source.open.values() if one.request_id not in there]
            source.asked = self._lost.ask(lost, last_alive_ms(source.reader.folder))
        if source.asked is not None:
            try:
                rows = source.asked.rows()
            except Exception:
                source.asked = None  # ask again
                raise
            if rows is None:
                return  # still waiting for an answer; checked again in the next round
            for start in range(0, len(rows), 500):
                self._commit(rows[start : start + 500])
            logger.warning("booked %d requests of a dead worker as lost", len(rows))
        # Only now: until lost requests are booked, their openings are the only record of them.
        remove_folder(source.reader.folder)
        self._release(source)
        self._taken.remove(source)
        self.taken_over += 1

    def _release(self, source: Source) -> None:
        source.reader.close()
        with contextlib.suppress(OSError):
            os.close(source.lock)

    # ---- retention ----

    def _remove_old(self) -> bool:
        if not self._config.keep_days or time.monotonic() < self._retention_at:
            return False
        before = int(time.time() * 1000) - self._config.keep_days * _DAY_MS
        if self._store.remove_before(before, _REMOVE_ROWS) == _REMOVE_ROWS:
            return True
        self._retention_at = time.monotonic() + _RETENTION_S
        return False

    # ---- logging ----

    def _is_away(self, error: StoreAway) -> None:
        now = time.monotonic()
        self.trouble = str(error)
        if self.away_since is None:
            self.away_since = now
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            waiting = self._journal.written - self.removed_bytes
            logger.error("%s; rows wait in write-ahead files (%d bytes)", error, waiting)

    def _is_back(self) -> None:
        if self.away_since is not None:
            logger.warning("the ledger's store is back after %.1f s", time.monotonic() - self.away_since)
            self.away_since, self.trouble, self._said_at = None, "", 0.0

    def _leave(self) -> None:
        """Give the folders up: remove empty ones, leave others for the next worker."""
        own, drained = self._own, not self._own.batch and not self._held and not self._own.reader.next_lines()
        own.reader.close()
        self._journal.release(remove=drained and not self._journal.unfinished)
        for source in self._taken:
            self._release(source)
        self._store.close()
