"""LocalSubstrate with real processes: found again, told apart, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.substrates import local
from ridgeline.fleet.substrates.local import LocalSubstrate, Place
from ridgeline.fleet.substrates.substrate import MARK, Handle, ReplicaSpec, SubstrateError
from ridgeline.running import process_ticks
from tests.patience import PATIENCE_S

# A "server" with an "engine": the parent ends at SIGTERM, its child never does.
PROGRAM = """#!/bin/sh
sleep 600 &
echo $! > "$PIDS"
trap 'exit 0' TERM
wait
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "serve"
    path.write_text(PROGRAM)
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


FLEET = secrets.token_hex(4)  # several runs of these tests at once do not find each other's processes


def spec(id: str, tmp_path: Path, gpus: int = 0) -> ReplicaSpec:
    environment = {"PIDS": str(tmp_path / f"{id}.child")}
    return ReplicaSpec(FLEET, id, "m", "v", "source", (), environment, ResourcesConfig(gpus=gpus))


async def child_of(id: str, tmp_path: Path) -> int:
    path = tmp_path / f"{id}.child"
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
async def test_a_stopped_replica_leaves_no_process(program: Path, tmp_path: Path, drain_s: float) -> None:
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    handle = await substrate.start(spec("m-1", tmp_path))
    child = await child_of("m-1", tmp_path)
    assert (await substrate.poll(handle)).phase == "running"
    await substrate.stop(handle, drain_s)
    assert (await substrate.poll(handle)).phase == "exited"
    assert process_ticks(child) is None
    assert await substrate.find(FLEET) == []


async def test_a_second_controller_does_not_cut_a_drain_short(tmp_path: Path, program: Path) -> None:
    """A second SIGTERM ends a server without its drain."""
    signals = tmp_path / "signals"
    program.write_text(
        f"#!/bin/sh\ntrap 'echo x >> {signals}' TERM\ntouch {signals}\nwhile :; do sleep 0.05; done\n"
    )
    first, second = (LocalSubstrate(tmp_path, LocalConfig()) for _ in range(2))
    handle = await first.start(spec("m-1", tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while not signals.exists():
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(first.stop(handle, 60.0))
        while not signals.read_text():
            await asyncio.sleep(0.01)
        draining.cancel()
        again = asyncio.create_task(second.stop(handle, 60.0))
        await asyncio.sleep(0.5)
        again.cancel()
    assert signals.read_text() == "x\n"
    await second.stop(handle, 0.0)
    assert await second.find(FLEET) == []


async def test_a_killed_replicas_engine_is_ended_too(program: Path, tmp_path: Path) -> None:
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    handle = await substrate.start(spec("m-1", tmp_path))
    child = await child_of("m-1", tmp_path)
    os.kill(msgspec.json.decode(handle.place, type=Place).pid, 9)
    async with asyncio.timeout(PATIENCE_S):
        while (seen := await substrate.poll(handle)).phase != "exited":
            await asyncio.sleep(0.01)
    assert (seen.exit_code, seen.reason) == (-9, "signal 9")
    async with asyncio.timeout(PATIENCE_S):
        while process_ticks(child) is not None:
            await asyncio.sleep(0.01)


async def test_how_a_replica_ended_is_known_though_its_threads_end_after_it(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process counts as ended with its first thread, and can be waited for with its last."""
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    handle = await substrate.start(spec("m-1", tmp_path))
    await child_of("m-1", tmp_path)
    monkeypatch.setattr(local, "process_ticks", lambda pid: None)  # its first thread has ended
    seen = await substrate.poll(handle)
    assert (seen.phase, seen.exit_code, seen.reason) == ("exited", -9, "signal 9")


async def test_another_controller_finds_the_replicas_of_its_own_fleet(program: Path, tmp_path: Path) -> None:
    first = LocalSubstrate(tmp_path, LocalConfig())
    handles = [await first.start(spec(id, tmp_path)) for id in ("m-1", "m-2")]
    for id in ("m-1", "m-2"):
        await child_of(id, tmp_path)
    second = LocalSubstrate(tmp_path, LocalConfig())
    found = await second.find(FLEET)
    assert sorted(found, key=lambda one: one.replica) == handles
    assert await second.find(FLEET + "0") == []
    for handle in found:
        await second.stop(handle, 0.0)
    assert await second.find(FLEET) == []


async def test_a_process_that_got_the_same_number_later_is_not_taken_for_the_replica(tmp_path: Path) -> None:
    place = Place(os.getpid(), 1, local.process_place(), str(tmp_path / "log"))
    handle = Handle("m-1", msgspec.json.encode(place).decode())
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    assert (await substrate.poll(handle)).phase == "exited"
    await substrate.stop(handle, 1.0)  # this test goes on


async def test_gpus_are_given_to_one_replica_at_a_time(program: Path, tmp_path: Path) -> None:
    substrate = LocalSubstrate(tmp_path, LocalConfig(gpus=("0", "1")))
    one = await substrate.start(spec("m-1", tmp_path, gpus=2))
    with pytest.raises(SubstrateError, match="0 of"):
        await substrate.start(spec("m-2", tmp_path, gpus=1))
    pid = msgspec.json.decode(one.place, type=Place).pid
    await child_of("m-1", tmp_path)
    assert b"CUDA_VISIBLE_DEVICES=0,1" in Path(f"/proc/{pid}/environ").read_bytes()
    assert f"{MARK}={FLEET}/m-1".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    await substrate.stop(one, 0.0)
    two = await substrate.start(spec("m-2", tmp_path, gpus=1))
    await substrate.stop(two, 0.0)


async def test_a_time_for_which_everything_stood_still_does_not_end_a_drain(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen container: controller and replica go on together, when the deadline is long over."""
    monkeypatch.setattr(local, "LONGEST_POLL_S", 0.1)
    monkeypatch.setattr(local, "KILL_GRACE_S", PATIENCE_S)
    said, told = tmp_path / "said", tmp_path / "told"
    program.write_text(
        f"#!/bin/sh\ntrap 'touch {told}' TERM\ntouch {said}\nwhile ! [ -e {told} ]; do sleep 0.05; done\n"
        f"sleep 0.5\necho bye > {said}\n"
    )
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    handle = await substrate.start(spec("m-1", tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while not said.exists():
            await asyncio.sleep(0.01)
    draining = asyncio.create_task(substrate.stop(handle, 0.5))
    await asyncio.sleep(0.1)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 10 * PATIENCE_S)
    monkeypatch.setattr(local, "time", later)
    await draining
    assert said.read_text() == "bye\n"


async def test_a_replica_that_ignores_its_end_is_killed_after_the_drain(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_GRACE_S", 0.1)
    program.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.05; done\n")
    substrate = LocalSubstrate(tmp_path, LocalConfig())
    handle = await substrate.start(spec("m-1", tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        await substrate.stop(handle, 0.1)
    assert (await substrate.poll(handle)).phase == "exited"


async def test_the_gpus_of_an_adopted_replica_are_in_use(program: Path, tmp_path: Path) -> None:
    config = LocalConfig(gpus=("0",))
    handle = await LocalSubstrate(tmp_path, config).start(spec("m-1", tmp_path, gpus=1))
    second = LocalSubstrate(tmp_path, config)
    await second.adopt(handle, {})
    with pytest.raises(SubstrateError, match="m-2 needs 1 GPUs; 0 of"):
        await second.start(spec("m-2", tmp_path, gpus=1))
    await second.stop(handle, 0.0)


async def test_a_search_for_replicas_leaves_the_event_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def marked(fleet: str) -> list[tuple[int, str]]:
        threads.append(threading.current_thread())
        return []

    monkeypatch.setattr(local, "_marked", marked)
    assert await LocalSubstrate(tmp_path, LocalConfig()).find(FLEET) == []
    assert threads != [threading.current_thread()]
    assert len(threads) == 1
