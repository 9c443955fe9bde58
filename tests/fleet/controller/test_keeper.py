"""A replica whose substrate fails is neither forgotten nor said to have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.life import keeper as keeper_module
from ridgeline.fleet.controller.life.keeper import ReplicaKeeper
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.substrates.local import LocalSubstrate
from ridgeline.fleet.substrates.substrate import Handle, Observed, ReplicaSpec, SubstrateError
from ridgeline.replica.messages import Load, makes_progress
from ridgeline.storage.errors import StorageUnavailable
from tests.patience import PATIENCE_S


class FailingSubstrate(LocalSubstrate):
    """Fails to end replicas, as one does whose API is away."""

    failures = 0
    stops = 0

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        return None

    async def stop(self, handle: Handle, drain_s: float) -> None:
        self.stops += 1
        if self.failures:
            self.failures -= 1
            raise SubstrateError("the API does not answer")


class Keeping:
    def __init__(self, path: Path, store: FleetStore) -> None:
        self.store, self.board = store, Board()
        self.substrate = FailingSubstrate(path, LocalConfig())
        self.keeper = ReplicaKeeper(
            FleetConfig(drain_s=0.1),
            store,
            self.substrate,
            cast(Any, None),
            EventLog(store, self.board, 100),
            time.monotonic,
            on_ready=lambda replica: None,
            on_lost=lambda replica, served_s: 0.0,
            settled=lambda: asyncio.sleep(0),
        )

    async def add(self, id: str) -> Replica:
        replica = Replica(id, "chat", "v1", time.monotonic())
        replica.handle = Handle(id, "somewhere")
        replica.enter("ready", time.monotonic())
        self.keeper.replicas[id] = replica
        await self.store.save_replica(replica.stored())
        return replica


@pytest.fixture
async def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeping]:
    monkeypatch.setattr(keeper_module, "STOP_RETRY_S", (0.01,))
    store = FleetStore(tmp_path)
    await store.open()
    assert await store.lease.try_take() is None
    made = Keeping(tmp_path, store)
    yield made
    made.keeper.leave()
    await store.close()


async def test_a_replica_that_could_not_be_ended_is_ended_later(keeping: Keeping) -> None:
    replica = await keeping.add("chat-1")
    keeping.substrate.failures = 3
    await keeping.keeper.drain(replica, "asked for")
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert keeping.substrate.stops == 4
    assert keeping.keeper.replicas == {}
    assert await keeping.store.replicas() == []
    told = [event.text for event in keeping.board.recent]
    assert told[1:] == ["chat-1 cannot be ended yet: the API does not answer", "chat-1 has ended"]


async def test_a_hurried_end_names_the_replicas_that_are_left(keeping: Keeping) -> None:
    replica = await keeping.add("chat-1")
    keeping.substrate.failures = 10**9
    await keeping.keeper.drain(replica, "asked for")
    await keeping.keeper.kill()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert keeping.keeper.left == ["chat-1"]
    assert [one.id for one in await keeping.store.replicas()] == ["chat-1"]  # the next controller ends it


class AmbiguousSubstrate(FailingSubstrate):
    """A start is carried out, but not answered."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.runs: dict[str, Handle] = {}

    async def start(self, spec: ReplicaSpec) -> Handle:
        self.runs[spec.id] = Handle(spec.id, "somewhere")
        raise SubstrateError("the API does not answer")

    async def stop(self, handle: Handle, drain_s: float) -> None:
        await super().stop(handle, drain_s)
        self.runs.pop(handle.replica, None)

    async def find(self, fleet: str) -> Sequence[Handle]:
        return list(self.runs.values())


async def look_until(keeper: ReplicaKeeper, right: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not right():
            await keeper.look_at_all()
            await asyncio.sleep(0.01)


async def test_a_replica_whose_start_was_not_answered_is_found_and_ended_at_once(
    keeping: Keeping, tmp_path: Path
) -> None:
    substrate = AmbiguousSubstrate(tmp_path, LocalConfig())
    keeping.keeper._substrate = keeping.substrate = substrate
    spec = ReplicaSpec("f", "chat-1", "chat", "v1", "source", (), {}, ResourcesConfig())
    substrate.runs["chat-2"] = (await keeping.add("chat-2")).handle or Handle("chat-2", "")
    await keeping.keeper.start(spec)
    async with asyncio.timeout(PATIENCE_S):
        while "chat-1" not in substrate.runs:
            await asyncio.sleep(0.01)
        while "chat-1" in substrate.runs:
            keeping.keeper.look_for_orphans("f")
            await asyncio.sleep(0.01)
    assert keeping.keeper.replicas["chat-1"].state == "lost"
    assert list(substrate.runs) == ["chat-2"]  # it has a record
    assert "chat-1 runs without a record and is ended" in [event.text for event in keeping.board.recent]


async def test_what_cannot_be_written_down_is_neither_started_nor_drained(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = await keeping.add("chat-1")
    serving.ready_since = serving.since

    async def full(*given: object) -> None:
        raise StorageUnavailable("the state directory is full", OSError(28, "No space left on device"))

    monkeypatch.setattr(keeping.store, "add_event", full)
    spec = ReplicaSpec("f", "chat-2", "chat", "v1", "source", (), {}, ResourcesConfig())
    with pytest.raises(StorageUnavailable):
        await keeping.keeper.start(spec)
    with pytest.raises(StorageUnavailable):
        await keeping.keeper.drain(serving, "asked for")
    assert [(one.id, one.state) for one in keeping.keeper.replicas.values()] == [("chat-1", "ready")]
    monkeypatch.undo()
    await keeping.keeper.drain(serving, "asked for")
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert keeping.substrate.stops == 1


class SlowSubstrate(FailingSubstrate):
    """An API that does not answer about some replicas. A test says when it does."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.hung: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.asked = self.most_asked = 0

    async def start(self, spec: ReplicaSpec) -> Handle:
        self.started.append(spec.id)
        if spec.id in self.hung:
            await self.hung[spec.id].wait()
        return Handle(spec.id, "somewhere")

    async def stop(self, handle: Handle, drain_s: float) -> None:
        self.stopped.append(handle.replica)

    async def poll(self, handle: Handle) -> Observed:
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        try:
            await self.hung.get(handle.replica, ANSWERS).wait()
        finally:
            self.asked -= 1
        return Observed("exited", reason="it has ended")

    async def find(self, fleet: str) -> Sequence[Handle]:
        return []


ANSWERS = asyncio.Event()
ANSWERS.set()


def slow(keeping: Keeping, tmp_path: Path, *hung: str) -> SlowSubstrate:
    made = SlowSubstrate(tmp_path, LocalConfig())
    made.hung = {id: asyncio.Event() for id in hung}
    keeping.keeper._substrate = keeping.substrate = made
    return made


async def test_a_substrate_that_hangs_about_one_replica_holds_up_no_other(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    first, second = await keeping.add("chat-1"), await keeping.add("chat-2")
    await look_until(keeping.keeper, lambda: second.state == "lost")
    assert first.state == "ready"
    await keeping.keeper.look_at_all()
    assert substrate.most_asked <= 2, "one that is not answered is not asked again"
    substrate.hung["chat-1"].set()
    await look_until(keeping.keeper, lambda: first.state == "lost")


async def test_an_answer_about_a_replica_that_drains_meanwhile_is_not_taken_for_its_loss(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    replica = await keeping.add("chat-1")
    await keeping.keeper.look_at_all()
    await keeping.keeper.drain(replica, "asked for")
    substrate.hung["chat-1"].set()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    await asyncio.wait([cast(Any, replica.looking)])
    assert [event.kind for event in keeping.board.recent] == ["drain", "ended"]


async def test_looks_are_bounded(keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    ids = [f"chat-{number}" for number in range(keeper_module.LOOKS + 8)]
    substrate = slow(keeping, tmp_path, *ids)
    for id in ids:
        await keeping.add(id)
    await keeping.keeper.look_at_all()
    assert substrate.asked == keeper_module.LOOKS
    for event in substrate.hung.values():
        event.set()
    await look_until(
        keeping.keeper, lambda: all(one.state == "lost" for one in keeping.keeper.replicas.values())
    )
    assert substrate.most_asked == keeper_module.LOOKS


def spec_of(id: str) -> ReplicaSpec:
    return ReplicaSpec("f", id, "chat", "v1", "source", (), {}, ResourcesConfig())


async def test_a_start_that_hangs_holds_up_nothing_and_counts_until_it_is_ended(
    keeping: Keeping, tmp_path: Path
) -> None:
    substrate = slow(keeping, tmp_path, "chat-1")
    await keeping.keeper.start(spec_of("chat-1"))
    await keeping.keeper.start(spec_of("chat-2"))
    second = keeping.keeper.replicas["chat-2"]
    await look_until(keeping.keeper, lambda: second.state == "lost")  # started, asked about, found dead
    first = keeping.keeper.replicas["chat-1"]
    assert (first.state, first.reason) == ("starting", "its substrate has not answered its start yet")
    assert "chat-1" in substrate.started
    await keeping.keeper.drain(first, "asked for")
    await asyncio.sleep(0)
    assert substrate.stopped == ["chat-2"]
    substrate.hung["chat-1"].set()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert substrate.stopped == ["chat-2", "chat-1"]
    assert "chat-1" not in keeping.keeper.replicas
    assert await keeping.store.replicas() == []


async def test_a_hurried_end_does_not_wait_for_a_start(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    await keeping.keeper.start(spec_of("chat-1"))
    async with asyncio.timeout(PATIENCE_S):
        while not substrate.started:
            await asyncio.sleep(0.01)
        await keeping.keeper.drain(keeping.keeper.replicas["chat-1"], "asked for")
        await keeping.keeper.kill()
        await keeping.keeper.all_ended()
    assert keeping.keeper.left == ["chat-1"]


async def test_a_start_whose_turn_comes_too_late_is_not_begun(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was drained meanwhile, or another controller leads."""
    keeping.keeper._starts = asyncio.Semaphore(1)
    substrate = slow(keeping, tmp_path, "chat-1")
    for number in (1, 2, 3):
        await keeping.keeper.start(spec_of(f"chat-{number}"))
    async with asyncio.timeout(PATIENCE_S):
        while substrate.started != ["chat-1"]:
            await asyncio.sleep(0.01)
        await keeping.keeper.drain(keeping.keeper.replicas["chat-2"], "asked for")
        keeping.store.lease.fence += 1  # as after a takeover: this controller's fence is not the newest
        substrate.hung["chat-1"].set()
        await keeping.keeper.lost_lease.wait()
    assert substrate.started == ["chat-1"]


async def test_a_bug_in_a_start_ends_the_replica_and_not_the_loop(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    substrate = slow(keeping, tmp_path)

    async def start(spec: ReplicaSpec) -> Handle:
        raise KeyError("uid")

    monkeypatch.setattr(substrate, "start", start)
    await keeping.keeper.start(spec_of("chat-1"))
    replica = keeping.keeper.replicas["chat-1"]
    await look_until(keeping.keeper, lambda: replica.state == "lost")
    assert replica.reason == "'uid'"


class StartingSubstrate(FailingSubstrate):
    async def poll(self, handle: Handle) -> Observed:
        return Observed("running", reason="it has not bound its port yet")

    async def find(self, fleet: str) -> Sequence[Handle]:
        return []


async def test_a_replica_that_starts_is_not_lost_because_the_clock_was_set(
    keeping: Keeping, tmp_path: Path
) -> None:
    keeping.keeper._substrate = keeping.substrate = StartingSubstrate(tmp_path, LocalConfig())
    stored = (await keeping.add("chat-1")).stored()
    keeping.keeper.replicas.clear()
    hour_ago = msgspec.structs.replace(stored, state="starting", created=time.time() - 3600.0)
    await keeping.store.save_replica(hour_ago)
    await keeping.keeper.adopt("f", {"chat": {}})
    replica = keeping.keeper.replicas["chat-1"]
    await look_until(keeping.keeper, lambda: bool(replica.reason))
    assert (replica.state, replica.reason) == ("starting", "it has not bound its port yet")


def test_a_controller_that_was_paused_does_not_take_its_own_silence_for_the_replicas() -> None:
    replica = Replica("chat-1", "chat", "v1", 0.0)
    replica.hear(Load(0, "ready", 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0), 10.0)
    assert replica.stalled(50.0, stall_s=30.0)
    controller = Controller.__new__(Controller)
    controller.keeper = cast(Any, SimpleNamespace(replicas={"chat-1": replica}))
    controller.excuse(0.2)  # an ordinary turn
    assert replica.stalled(50.0, stall_s=30.0)
    controller.excuse(39.0)
    assert not replica.stalled(50.0, stall_s=30.0)
    assert replica.stalled(80.0, stall_s=30.0)


def test_a_long_step_is_no_stall_while_the_engine_answers() -> None:
    replica = Replica("chat-1", "chat", "v1", 0.0)
    for second in range(50):
        beat = min(second, 20)  # its engine's process is stopped after 20 s
        line = Load(0, "ready", 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, beats=beat, step_s=float(second))
        replica.hear(line, float(second))
        assert bool(replica.stalled(float(second), stall_s=15.0)) is (second > 35), second


def test_an_engine_that_is_stopped_in_its_first_step_stands_still() -> None:
    """Its figures are from before the step: no request runs. The server knows of one."""

    def load(turns: int, accepted: int = 1) -> Load:
        counts = dict.fromkeys(
            ("running", "waiting", "queued_tokens", "kv_blocks_held", "kv_blocks_cached"), 0
        )
        more = dict.fromkeys(("ended", "prompt_tokens", "output_tokens", "prefix_queries", "prefix_hits"), 0)
        return Load(seq=0, state="ready", steps=1, accepted=accepted, turns=turns, **counts, **more)

    assert makes_progress(load(5), load(6), 60.0)  # its loop turns: a grammar is compiled
    assert not makes_progress(load(5), load(5), 60.0)
    assert makes_progress(load(5, accepted=0), load(5, accepted=0), 60.0)  # idle
