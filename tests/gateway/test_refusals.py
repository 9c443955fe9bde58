"""Requests that the gateway refuses cost a bounded number of rows and lines, and every one is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.gateway.accounting.store.reports import UsageQuery
from ridgeline.gateway.pipeline import refusals
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import CHAT, asking, staged

ROWS = refusals.ROWS_PER_PERIOD


def log_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


async def test_refusals_of_a_key_cost_few_rows_and_lines_and_each_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    values = {"observe": {"access_log": str(log)}}
    async with staged(tmp_path, values, key={"limits": Limits(requests_per_minute=1)}) as stage:
        asked = ROWS + 30
        answers = [(await stage.http.post(CHAT, json=asking())).status_code for _ in range(asked)]
        assert answers == [200] + [429] * (asked - 1)
        await stage.app.drained()
        rows = await stage.rows(1 + ROWS + 1)
        (counted,) = [row for row in rows if row["repeats"]]
        assert (counted["outcome"], counted["error_code"]) == ("limited", "rate_limit_exceeded")
        assert len(rows) + counted["repeats"] == asked
        (line,) = (await stage.parts.ledger._reader.usage(UsageQuery()))[0]
        assert line.requests == asked
    assert log_lines(log) == 1 + ROWS + 1


async def test_another_key_and_another_reason_have_rows_of_their_own(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(requests_per_minute=0), "models": ("a",)}) as stage:
        for _ in range(ROWS + 5):
            await stage.http.post(CHAT, json=asking("a"))
        other, secret = await stage.new_key(name="other", models=("a",))
        async with stage.client(secret) as http:
            await http.post(CHAT, json=asking("b"))
        rows = await stage.rows(ROWS + 1)
        assert [row["error_code"] for row in rows if row["key_id"] == other.id] == ["model_not_allowed"]


async def test_the_counted_row_is_written_when_the_minute_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "PERIOD_S", 0.2)
    monkeypatch.setattr(refusals, "ROWS_PER_PERIOD", 0)
    async with staged(tmp_path, key={"models": ("a",)}) as stage:
        await stage.http.post(CHAT, json=asking("b"))
        (row,) = await stage.rows(1)
        assert (row["error_code"], row["repeats"]) == ("model_not_allowed", 0)


async def test_requests_without_a_known_key_cost_no_rows_and_no_lines(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with staged(tmp_path, {"observe": {"access_log": str(log)}}) as stage:
        async with stage.client("rk-nobody") as http:
            for _ in range(30):
                assert (await http.post(CHAT, json=asking())).status_code == 401
        await stage.app.drained()
        assert (await stage.http.post(CHAT, json=asking())).status_code == 200
        await stage.rows(1)
    assert log_lines(log) == 1
