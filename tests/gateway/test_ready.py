"""GET /ready: red while a request could not be booked, green again as soon as one can."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.accounting.books import files_of_at_most
from tests.gateway.stage import CHAT, asking, staged
from tests.gateway.waiting import until


async def test_ready_is_red_while_no_row_can_be_written_and_green_once_one_can(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        assert (await stage.http.get("/ready")).status_code == 200
        with files_of_at_most(0):
            assert (await stage.http.post(CHAT, json=asking())).status_code == 503
            red = await stage.http.get("/ready")
            assert (red.status_code, "write-ahead file" in red.json()["reason"]) == (503, True)
        assert (await stage.http.get("/ready")).status_code == 200
        assert (await stage.http.post(CHAT, json=asking())).status_code == 200


async def test_ready_is_red_while_write_ahead_files_are_over_their_bound(tmp_path: Path) -> None:
    # Rows stay in the files: the store is not written to for an hour.
    ledger = {"max_bytes": 5000, "segment_bytes": 4096, "flush_ms": 3_600_000, "stop_s": 0.0}
    async with staged(tmp_path, {"ledger": ledger}) as stage:
        statuses = [(await stage.http.post(CHAT, json=asking())).status_code for _ in range(12)]
        assert statuses[-1] == 503
        red = await stage.http.get("/ready")
        assert (red.status_code, "max_bytes (5000 bytes)" in red.json()["reason"]) == (503, True)


@pytest.mark.parametrize(("memory_rows", "ready"), [(1000, 200), (0, 503)])
async def test_a_gateway_that_serves_without_its_files_is_ready_while_memory_takes_rows(
    tmp_path: Path, memory_rows: int, ready: int
) -> None:
    ledger = {"when_full": "serve", "memory_rows": memory_rows}
    async with staged(tmp_path, {"ledger": ledger}) as stage:
        with files_of_at_most(0):
            assert (await stage.http.post(CHAT, json=asking())).status_code == 200
            state = stage.parts.ledger.state
            await until(lambda: bool(state().held or state().dropped or state().moved))
            assert (await stage.http.get("/ready")).status_code == ready
