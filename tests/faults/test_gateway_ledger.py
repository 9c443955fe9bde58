"""The ledger equals the upstream's own books, while workers, the gateway and PostgreSQL die.

A small run of benchmarks/gateway_ledger.py: real gateway, real PostgreSQL, an upstream that counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gateway_ledger import measure


async def test_the_ledger_is_exact_through_kills_and_an_absent_database(tmp_path: Path) -> None:
    values = {"requests": 400, "clients": 8, "away": 2.0, "workers": 1, "seed": 3}
    asked = argparse.Namespace(**values, kind="ridgeline", sqlite=False, calm=False)
    result = await measure(asked, tmp_path)
    assert result["different"] == []
    assert result["charged_without_upstream"] == []
    assert result["seen_without_row"] == []
    assert result["cost_usd"] == result["cost_expected_usd"]
    assert result["is_exact"]
    # It was no idle run: each of these came about.
    assert {"ok", "client_gone", "cached", "upstream_failed", "refused"} <= set(result["outcomes"])
