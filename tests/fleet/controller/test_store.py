"""The lease and the store: one controller at a time, numbers that never come back, bounded events."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.lease import LEASE_S, LeaseLost
from ridgeline.fleet.controller.store import FleetStore, StoredReplica
from ridgeline.fleet.messages import Table
from tests.patience import PATIENCE_S

TAKE = """
import asyncio, pathlib, sys, time
from ridgeline.fleet.controller.store import FleetStore
async def main():
    store = FleetStore(pathlib.Path(sys.argv[1]))
    await store.open()
    assert await store.lease.try_take() is None
    print(store.lease.fence, flush=True)
    time.sleep(600)
asyncio.run(main())
"""

STOP_INSIDE_A_WRITE = """
import asyncio, os, pathlib, signal, sys, time
from ridgeline.fleet.controller.store import FleetStore
async def main():
    store = FleetStore(pathlib.Path(sys.argv[1]))
    await store.open()
    assert await store.lease.try_take() is None
    def work():
        yield "UPDATE fleet_lease SET renewals = renewals + 1", ()
        print("inside", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # another thread may take the signal: this one must not go on to commit
    await store._write(work())
asyncio.run(main())
"""


async def opened(path: Path) -> FleetStore:
    store = FleetStore(path)
    await store.open()
    return store


async def test_a_second_controller_waits_while_the_first_renews(tmp_path: Path) -> None:
    first, second = await opened(tmp_path), await opened(tmp_path)
    assert await first.lease.try_take() is None
    now = 100.0
    for _ in range(5):
        holder = await second.lease.try_take(now)
        assert holder is not None
        assert holder.fence == first.lease.fence
        await first.lease.renew()
        now += LEASE_S / 2
    await first.close()
    await second.close()


async def test_a_controller_that_stopped_renewing_is_fenced(tmp_path: Path) -> None:
    first, second = await opened(tmp_path), await opened(tmp_path)
    assert await first.lease.try_take() is None
    assert await second.lease.try_take(100.0) is not None
    assert await second.lease.try_take(100.0 + LEASE_S) is None
    assert second.lease.fence == first.lease.fence + 1
    with pytest.raises(LeaseLost):
        await first.save_replica(StoredReplica("a-1", "a", "v", "starting", 0.0))
    with pytest.raises(LeaseLost):
        await first.lease.renew()
    await first.lease.release()  # of a lost lease: no effect
    assert not (await second.lease.holder()).is_gone
    assert await second.replicas() == []
    await first.close()
    await second.close()


async def test_a_killed_controllers_lease_is_free_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", TAKE, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            fence = int(process.stdout.readline())
            store = await opened(tmp_path)
            assert await store.lease.try_take() is not None
        finally:
            process.kill()
    assert await store.lease.try_take() is None
    assert store.lease.fence == fence + 1
    await store.close()


async def test_a_controller_that_stopped_inside_a_write_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.fleet.controller.store.TIMEOUT_S", 0.2)
    command = [sys.executable, "-c", STOP_INSIDE_A_WRITE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"inside\n"
            store = await opened(tmp_path)
            assert await store.lease.try_take(100.0) is not None
            assert await store.lease.try_take(100.0 + LEASE_S) is not None  # the file is locked
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            process.kill()
    assert await store.lease.try_take(101.0 + LEASE_S) is None
    await store.close()


def test_a_standstill_does_not_count_as_time() -> None:
    times = iter([0.0, 1.0, 2.5, 62.5, 63.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock() for _ in range(4)] == [1.0, 2.5, 2.5, 3.0]


async def test_a_table_that_does_not_change_is_followed_by_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ridgeline.fleet.controller.board.BEAT_S", 0.01)
    board = Board()
    table = Table(1, (), (), "key")
    board.set_table(table)
    tables = board.tables()
    assert [await anext(tables) for _ in range(3)] == [table, None, None]


async def test_only_one_of_many_takes_a_free_lease(tmp_path: Path) -> None:
    stores = [await opened(tmp_path) for _ in range(8)]
    taken = await asyncio.gather(*(store.lease.try_take() for store in stores))
    assert sum(one is None for one in taken) == 1
    for store in stores:
        await store.close()


async def test_what_a_controller_stored_the_next_one_reads(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.lease.try_take()
    fleet = await store.fleet_id()
    numbers = [await store.count("a") for _ in range(3)]
    one = StoredReplica("a-3", "a", "v", "ready", 5.0, "{}", "e", {"spawn": 0.5}, "eu-west", "spot")
    await store.save_replica(one)
    await store.save_model("a", b"{}")
    for number in range(120):
        await store.add_event("start", f"{number}", 100, "a", "a-3", {"n": number})
    await store.lease.release()
    await store.close()
    store = await opened(tmp_path)
    assert await store.lease.try_take() is None
    assert await store.fleet_id() == fleet
    assert numbers == [1, 2, 3]
    assert await store.count("a") == 4
    assert await store.replicas() == [one]
    events = await store.events()
    assert [event.text for event in events] == [str(number) for number in range(20, 120)]
    assert [event.facts["n"] for event in await store.events(after=-2)] == [118, 119]
    assert await store.events(after=events[-1].id) == []
    await store.close()
