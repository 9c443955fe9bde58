"""LedgerReader: reports for an event loop.

Queries of the store run in a thread, one at a time: a long report blocks no other part of the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ridgeline.gateway.accounting.errors import StoreAway
from ridgeline.gateway.accounting.store.places import JOURNALS, store_at
from ridgeline.gateway.accounting.store.reports import Reports, UsageLine, UsageQuery
from ridgeline.gateway.errors import Unavailable
from ridgeline.storage.database import Value

T = TypeVar("T")

REPORT_S = 60.0  # longest time for one report


class LedgerReader:
    """Reports for an event loop."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._thread = ThreadPoolExecutor(1, "ledger-reports")

    async def usage(self, query: UsageQuery) -> tuple[list[UsageLine], int]:
        """The sums, and the number of rows that are still in write-ahead files of this machine."""
        return await self._run(lambda: (self._reports.usage(query), self._reports.waiting()))

    async def spent(self, kind: str, id: str, since_ms: int) -> int:
        """Picodollars of a key, team or model since then; Unavailable while the store is unreachable."""
        return await self._run(lambda: self._reports.spent(kind, id, since_ms))

    async def row(self, request_id: str) -> dict[str, Value] | None:
        return await self._run(lambda: self._reports.row(request_id))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._reports.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except StoreAway:
            raise Unavailable("the ledger's store cannot be reached", code="store_unavailable") from None


def usage_reader(store_url: str, state_dir: Path, timeout_s: float = REPORT_S) -> LedgerReader:
    return LedgerReader(Reports(store_at(store_url, state_dir, timeout_s), state_dir / JOURNALS))
