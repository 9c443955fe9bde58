"""Refusals: bounds the rows of requests that ended before any upstream was asked.

A key's first 20 in a minute have a row each. Further ones are counted by outcome and code: each kind gets one
row at the end of the minute, with the count in `repeats`. Metrics count every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ridgeline.gateway.accounting.row import LedgerRow

PERIOD_S = 60.0
ROWS_PER_PERIOD = 20


class _Period:
    """One key's refusals in one minute."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.written = 0
        self.counted: dict[tuple[str, str], LedgerRow] = {}


class Refusals:
    def __init__(self, write: Callable[[LedgerRow], None]) -> None:
        self._write = write
        self._periods: dict[str, _Period] = {}  # by key

    def takes(self, row: LedgerRow) -> bool:
        """Whether the row is counted here; the caller then does not write it."""
        if row.upstream or row.attempts or row.outcome in ("ok", "cached"):
            return False
        period = self._periods.get(row.key_id)
        if period is None:
            timer = asyncio.get_running_loop().call_later(PERIOD_S, self._end, row.key_id)
            period = self._periods[row.key_id] = _Period(timer)
        if period.written < ROWS_PER_PERIOD:
            period.written += 1
            return False
        first = period.counted.setdefault((row.outcome, row.error_code), row)
        if first is not row:
            first.repeats += 1
        return True

    def flush(self) -> None:
        """Write the counted rows: the worker ends."""
        for key_id in list(self._periods):
            self._end(key_id)

    def _end(self, key_id: str) -> None:
        period = self._periods.pop(key_id)
        period.timer.cancel()
        for row in period.counted.values():
            self._write(row)
