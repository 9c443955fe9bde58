"""A system clock that is set to another time opens no budget and no window, and moves no row."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway import clock
from ridgeline.gateway.clock import FOLLOW, SteadyClock
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import CHAT, asking, staged

DAY_S = 86_400.0


@given(steps=st.lists(st.tuples(st.floats(0, 1000), st.floats(-1e9, 1e9)), max_size=30))
def test_it_never_goes_back_and_never_runs_more_than_a_percent_fast(
    steps: list[tuple[float, float]],
) -> None:
    boot, wall = [0.0], [1e9]
    steady = SteadyClock(lambda: wall[0], lambda: boot[0])
    before = steady()
    for passed, jump in steps:
        boot[0] += passed
        wall[0] += passed + jump
        after = steady()
        assert passed * (1 - FOLLOW) - 1e-3 <= after - before <= passed * (1 + FOLLOW) + 1e-3
        before = after


def test_it_follows_a_clock_that_drifts() -> None:
    boot, wall = [0.0], [1e9]
    steady = SteadyClock(lambda: wall[0], lambda: boot[0])
    for _ in range(1000):
        boot[0] += 10
        wall[0] += 10.005  # 500 ppm, the most that NTP corrects
        assert abs(steady() - wall[0]) < 0.01


@pytest.mark.parametrize("jump_s", [-31 * DAY_S, -DAY_S, DAY_S, 31 * DAY_S])
async def test_a_jump_of_the_system_clock_does_not_free_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    offset = [0.0]
    monkeypatch.setattr(clock.unix_s, "_wall", lambda: time.time() + offset[0])
    limits = Limits(daily_usd=0.0001, monthly_usd=0.0001)
    async with staged(tmp_path, key={"limits": limits}) as stage:
        body = asking("mock_out20", max_tokens=20)
        assert (await stage.http.post(CHAT, json=body)).status_code == 200
        offset[0] = jump_s
        refused = await stage.http.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        # The rows that a forgotten budget is rebuilt from have the same time.
        await stage.rows(2)
        stage.parts.limiter._local.counts.clear()
        assert (await stage.http.post(CHAT, json=body)).status_code == 429
        rows = await stage.rows(3)
        assert max(row["at_ms"] for row in rows) - min(row["at_ms"] for row in rows) < 60_000
