"""Journal: writes answers in groups: rows that arrive while the disk is busy share one transaction."""

from __future__ import annotations

import asyncio

from ridgeline.server.batches.store import BatchStore, Finished


class Journal:
    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._rows: list[Finished] = []
        self._writing = asyncio.Lock()

    async def keep(self, row: Finished) -> None:
        """Returns when the row is on disk."""
        self._rows.append(row)
        async with self._writing:  # the first caller writes the rows of all waiting callers
            rows, self._rows = self._rows, []
            if not rows:
                return
            try:
                await asyncio.shield(asyncio.ensure_future(self._store.keep(rows)))
            except Exception:
                self._rows = rows + self._rows  # the next waiting caller retries
                raise
