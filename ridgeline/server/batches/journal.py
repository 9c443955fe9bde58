"""Journal: answers are written down in groups: what came while the disk was busy goes in one transaction."""

from __future__ import annotations

import asyncio

from ridgeline.server.batches.store import BatchStore, Finished


class Journal:
    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._rows: list[Finished] = []
        self._writing = asyncio.Lock()

    async def keep(self, row: Finished) -> None:
        """Returns when the row is on the disk."""
        self._rows.append(row)
        async with self._writing:  # whoever comes first writes for all who wait meanwhile
            rows, self._rows = self._rows, []
            if not rows:
                return
            try:
                await asyncio.shield(asyncio.ensure_future(self._store.keep(rows)))
            except Exception:
                self._rows = rows + self._rows  # for the next of those who wait, who will see for itself
                raise
