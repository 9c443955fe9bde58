"""The wall clock is set by an hour in either direction: waits, replicas and the journal do not notice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.fleet.messages import ModelEntry
from tests.faults.fleet.clock_shift import ClockShift
from tests.fleet.router.conftest import Stage, counted, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_durable_hold import PATH, Router, chat, is_waiting, key
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not ClockShift.can_be_built(), reason="needs a C compiler (cc)")
HOUR_S = 3600


def test_the_library_moves_the_wall_clock_and_not_the_monotonic_one(tmp_path: Path) -> None:
    shift = ClockShift(tmp_path)
    program = "import time; print(int(time.time()), time.monotonic())"
    seen = []
    for offset in (0, HOUR_S, -HOUR_S):
        shift.set(offset)
        made = subprocess.run(
            [sys.executable, "-c", program], env=shift.environment, capture_output=True, text=True, check=True
        )
        at, steady = made.stdout.split()
        seen.append(int(at))
        assert abs(float(steady) - time.monotonic()) < PATIENCE_S
    assert 3500 < seen[1] - seen[0] < 3700 + PATIENCE_S
    assert 3500 < seen[0] - seen[2] < 3700 + PATIENCE_S


async def test_a_router_holds_serves_and_keeps_its_journal_over_steps_of_its_clock(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = ClockShift(tmp_path)
    for name, value in shift.environment.items():
        monkeypatch.setenv(name, value)
    stage.controller.set(
        model=ModelEntry(MODEL, max_held=32, hold_s=PATIENCE_S, cold_s=PATIENCE_S, durable=True)
    )
    router = Router(stage, held_dir=str(tmp_path / "held"), keeps_journal=True)
    try:
        asked = [
            asyncio.create_task(router.client.post(PATH, json=chat(number), headers=headers))
            for number, headers in enumerate(({}, key(1), key(2)))
        ]
        await is_waiting(router.client, "key 2")
        for offset in (HOUR_S, -HOUR_S):  # requests that wait are neither refused nor forgotten
            shift.set(offset)
            await asyncio.sleep(0.6)
            assert not any(task.done() for task in asked)
        assert (await is_waiting(router.client, "key 1"))["state"] == "waiting"
        shift.set(HOUR_S)
        (first,) = await stage.add()
        assert [(await task).status_code for task in asked] == [200] * 3
        first.gate = asyncio.Event()
        stream = asyncio.create_task(router.client.post(PATH, json=chat(9, stream=True)))
        await until(lambda: first.running == 1, "the stream")
        for offset in (-HOUR_S, HOUR_S):  # its replica is not ejected, and it is not timed out
            shift.set(offset)
            await asyncio.sleep(0.6)
        first.gate.set()
        assert (await stream).content == counted(8)
        metrics = (await router.client.get("/metrics")).text
        assert 'replica_ejections_total{model="counter",replica="r0",router="router"} 0' in metrics
        assert (await router.client.get("/fleet/held/key 1")).status_code == 200  # its answer is not too old
        assert len(first.feeds) == 1
    finally:
        await router.close()
