"""What a route decided, as the ledger has it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store.places import sqlite_ledger, sqlite_path


def row(
    number: int, model: str, cost_pusd: int, why: dict[str, Any] | None, asked: str = "auto"
) -> LedgerRow:
    return LedgerRow(
        request_id=f"req_{number}",
        at_ms=int(time.time() * 1e3) - number,
        model_asked=asked,
        model=model,
        tokens_in=80,
        tokens_out=20,
        cost_pusd=cost_pusd,
        route="" if why is None else json.dumps(why),
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    store = sqlite_ledger(sqlite_path("", tmp_path), 5.0)
    shadowed = {"by": "predicted", "decide_ms": 4.0}
    store.insert(
        [
            *(row(n, "large", 1_000_000_000, {**shadowed, "shadow": "small"}) for n in range(6)),
            *(row(n, "large", 1_000_000_000, {**shadowed, "shadow": "large"}) for n in range(6, 8)),
            row(8, "large", 0, {"by": "rule", "rule": "tools", "shadow": "large", "decide_ms": 0.1}),
            row(9, "large", 0, {"attempts": 1}),
            row(10, "large", 5, {"by": "predicted"}, asked="other"),
            row(11, "small", 100_000_000, None, asked="small"),
        ]
    )
    store.close()
    return tmp_path


def test_a_shadow_is_compared_with_what_was_used(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "decisions", "--state-dir", str(state)]) == 0
    said = capsys.readouterr().out
    assert "9 requests of auto, 0.008000 USD" in said
    assert "predicted 8 (88.9%), rule 1 (11.1%)" in said
    assert "agreed with 3 of 9 (33.3%)" in said
    # Six requests of 0.001 USD would have gone to a model of a tenth of the price.
    assert "would have saved 0.005400 USD (67.5%)" in said
    assert "p50 4.0 ms" in said


def test_a_route_without_rows_or_a_folder_without_a_ledger_is_said(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", "decisions", "nowhere", "--state-dir", str(state)]) == 0
    assert "no request of the route nowhere" in capsys.readouterr().out
    assert main(["router", "decisions", "--state-dir", str(tmp_path / "empty")]) == 1
    assert "no such ledger" in capsys.readouterr().err
