"""What the tests of accounting share: rows, openings, a ledger that is started, the table's content."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.gateway.accounting.config import LedgerConfig
from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.row import LedgerRow, Opening
from tests.patience import PATIENCE_S

QUICK = LedgerConfig(flush_ms=10, takeover_s=0.05, ask_lost_s=0.5, retry_s=0.05, stop_s=PATIENCE_S)
AWAY = replace(QUICK, stop_s=0.2)  # a ledger that stops while its store does not answer


def opening(number: int, **fields: Any) -> Opening:
    values: dict[str, Any] = {
        "request_id": f"req_{number:06d}",
        "at_ms": 1_800_000_000_000 + number,
        "key_id": "key_a",
        "team_id": "team_a",
        "endpoint": "chat",
        "model_asked": "auto",
        "model": "small",
        "upstream": "local",
        "upstream_model": "smollm2",
        "stream": True,
        "tokens_in_estimate": 7,
    }
    return Opening(**(values | fields))


def row(number: int, **fields: Any) -> LedgerRow:
    values: dict[str, Any] = {
        "request_id": f"req_{number:06d}",
        "at_ms": 1_800_000_000_000 + number,
        "key_id": "key_a",
        "team_id": "team_a",
        "endpoint": "chat",
        "model": "small",
        "upstream": "local",
        "status": 200,
        "tokens_in": 10 + number,
        "tokens_out": 3,
        "cost_pusd": 1_000 + number,
        "usage_source": "reported",
    }
    return LedgerRow(**(values | fields))


@asynccontextmanager
async def started(state_dir: Path, config: LedgerConfig = QUICK, **parts: Any) -> AsyncIterator[Ledger]:
    ledger = Ledger(config, state_dir, "w0", **parts)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()


def stored(state_dir: Path, columns: str = "request_id") -> list[Any]:
    """The table of the SQLite file, ordered by request."""
    with sqlite3.connect(state_dir / "ledger.sqlite") as connection:
        rows = connection.execute(f"SELECT {columns} FROM ridgeline_ledger ORDER BY request_id").fetchall()
    connection.close()
    return [found[0] if len(found) == 1 else found for found in rows]


def journal_folders(state_dir: Path) -> list[Path]:
    return [path for path in (state_dir / "ledger").iterdir() if path.is_dir()]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, for every file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
