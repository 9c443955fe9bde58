"""The ledger's table, by version, for SQLite and PostgreSQL alike. A released step is never edited.

One column for each field of LedgerRow. A new field needs a step that adds its column.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.storage.database import Dialect, Step
from ridgeline.storage.migrations import table_with

COMPONENT = "ledger"
TABLE = "ridgeline_ledger"

_TEXT = "TEXT NOT NULL DEFAULT ''"
_COUNT = "BIGINT NOT NULL DEFAULT 0"
_FLAG = "BOOLEAN NOT NULL DEFAULT false"
_MS = "DOUBLE PRECISION"

_COLUMNS = {
    "request_id": f"{_TEXT} PRIMARY KEY",
    "at_ms": _COUNT,
    "key_id": _TEXT,
    "team_id": _TEXT,
    "endpoint": _TEXT,
    "model_asked": _TEXT,
    "model": _TEXT,
    "upstream": _TEXT,
    "upstream_model": _TEXT,
    "credential": _TEXT,
    "stream": _FLAG,
    "status": _COUNT,
    "outcome": _TEXT,
    "error_code": _TEXT,
    "tokens_in": _COUNT,
    "tokens_cached": _COUNT,
    "tokens_cache_write": _COUNT,
    "tokens_out": _COUNT,
    "tokens_reasoning": _COUNT,
    "audio_ms": _COUNT,
    "characters": _COUNT,
    "usage_source": _TEXT,
    "cost_pusd": _COUNT,
    "price_source": _TEXT,
    "attempts": _COUNT,
    "cache": _TEXT,
    "similarity": _MS,
    "gateway_ms": _MS,
    "queue_ms": _MS,
    "ttft_ms": _MS,
    "stream_ms": _MS,
    "total_ms": f"{_MS} NOT NULL DEFAULT 0",
    "route": _TEXT,
    "guard": _TEXT,
    "repeats": _COUNT,
}

_INDEXES = (
    f"CREATE INDEX {TABLE}_at ON {TABLE} (at_ms)",
    f"CREATE INDEX {TABLE}_key ON {TABLE} (key_id, at_ms)",
    f"CREATE INDEX {TABLE}_team ON {TABLE} (team_id, at_ms)",
    f"CREATE INDEX {TABLE}_model ON {TABLE} (model, at_ms)",
)


def steps(dialect: Dialect) -> Sequence[Step]:
    """Before version 1, every start added the columns that were missing: a table may lack any of them."""
    return (table_with(dialect, TABLE, _COLUMNS, _INDEXES),)
