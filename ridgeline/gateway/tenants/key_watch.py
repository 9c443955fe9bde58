"""KeyWatch: keeps one worker's KeyTable up to date by polling the store's version four times a second.

While the store is unreachable the last table stays in use, and `snapshot` has its age. With PostgreSQL a
copy is kept in the state directory, so that a worker that starts in the meantime has the keys too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable
from ridgeline.gateway.tenants.key_table import KeyTable
from ridgeline.gateway.tenants.key_table_copy import FILE, read_copy, write_copy
from ridgeline.gateway.tenants.store import Store

log = logging.getLogger(__name__)

COPY_SHARE = 0.05  # most of a thread's time for copies, while keys change all the time
STALE_S = 1.0  # after this time without the store, a revocation elsewhere may be unknown here


class KeyWatch:
    def __init__(self, store: Store, *, changed: Callable[[KeyTable], None] | None = None) -> None:
        """changed: called on the event loop after each change, with the new table."""
        self.table = KeyTable("")  # empty
        self._store = store
        self._changed = changed
        self._copy = store.state_dir / FILE if store.is_shared else None
        self._is_copied = True
        self._copy_after = -float("inf")  # monotonic
        self._is_copy = False  # not yet confirmed by the store itself
        self._refreshing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -float("inf")  # monotonic; of the last answer
        self._failures = 0

    async def start(self) -> None:
        """Returns when a table is loaded. StoreUnavailable if neither the store nor a copy has one."""
        try:
            await self.refresh()
        except StoreUnavailable:
            copy = await asyncio.to_thread(read_copy, self._copy) if self._copy is not None else None
            if copy is None:
                raise
            self._failures += 1
            self._is_copy = True
            self.table = copy
            log.warning("the store is unreachable; using the copy of keys and teams in the state directory")
        await self._keep_copy()
        self._task = asyncio.create_task(self._poll(), name="key-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def refresh(self) -> bool:
        """Poll now; True if something has changed. StoreUnavailable: the table stays unchanged."""
        async with self._refreshing:  # older changes are never applied after newer ones
            await self._store.prepare()
            if self.table.version == 0 or self._is_copy:
                self.table = KeyTable(self._store.server_secret).apply(await self._store.changes(0))
                self._is_copy = False
            elif await self._store.version() == self.table.version:
                self._asked_at = time.monotonic()
                return False
            else:
                self.table.apply(await self._store.changes(self.table.version))
            self._asked_at = time.monotonic()
        self._is_copied = False
        if self._changed is not None:
            self._changed(self.table)
        return True

    @property
    def is_stale(self) -> bool:
        return time.monotonic() - self._asked_at > STALE_S

    def snapshot(self) -> dict[str, float]:
        """For metrics: the greatest age of the table, and the number of failed polls."""
        age = time.monotonic() - self._asked_at
        return {
            "policy_version": self.table.version,
            "policy_age_s": age,  # infinite: the store has never answered
            "store_up": float(not self.is_stale),
            "store_failures": self._failures,
        }

    async def _poll(self) -> None:
        was_down = self._failures > 0
        while True:
            await asyncio.sleep(self._store.config.poll_s)
            try:
                await self.refresh()
                await self._keep_copy()
            except (StoreUnavailable, StoreError) as error:
                self._failures += 1
                if not was_down:
                    log.warning("keys and teams could not be updated: %s", error)
                was_down = True
            except Exception:
                # A poll that ends would leave revoked keys in use for ever.
                self._failures += 1
                if not was_down:
                    log.exception("keys and teams could not be updated")
                was_down = True
            else:
                if was_down:
                    log.warning("the store answers again; keys and teams are up to date")
                was_down = False

    async def _keep_copy(self) -> None:
        begun = time.monotonic()
        if self._copy is None or self._is_copied or begun < self._copy_after:
            return
        self._is_copied = True
        try:
            await asyncio.to_thread(write_copy, self._copy, self._store.server_secret, self.table.contents())
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._copy, error.strerror)
        ended = time.monotonic()
        self._copy_after = ended + (ended - begun) / COPY_SHARE
