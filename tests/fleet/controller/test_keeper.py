"""A replica whose substrate fails is neither forgotten nor said to have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.substrates.substrate import Handle, Observed, ReplicaSpec, SubstrateError
from ridgeline.replica.messages import Load, makes_progress
from ridgeline.storage.errors import StorageUnavailable
from tests.fleet.controller.keeping import FailingSubstrate, Keeping, look_until, spec_of
from tests.patience import PATIENCE_S


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


async def test_a_replica_whose_start_was_not_answered_is_found_and_ended_at_once(
    keeping: Keeping, tmp_path: Path
) -> None:
    substrate = AmbiguousSubstrate(tmp_path, LocalConfig())
    keeping.keeper._substrate = keeping.substrate = substrate
    spec = spec_of("chat-1")
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
    spec = spec_of("chat-2")
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


async def test_a_start_that_cannot_be_completed_is_made_anew_and_a_serving_replica_is_kept(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    substrate = StartingSubstrate(tmp_path, LocalConfig())
    keeping.keeper._substrate = keeping.substrate = substrate
    for id in ("chat-1", "chat-2"):
        stored = (await keeping.add(id)).stored()
        state = "starting" if id == "chat-1" else "ready"
        await keeping.store.save_replica(msgspec.structs.replace(stored, state=state))
    keeping.keeper.replicas.clear()

    async def adopt(handle: Handle, environment: Mapping[str, str] | None) -> None:
        raise SubstrateError("the API refused the Secret")

    monkeypatch.setattr(substrate, "adopt", adopt)
    await keeping.keeper.adopt("f", {"chat": {}})
    states = {id: one.state for id, one in keeping.keeper.replicas.items()}
    assert states == {"chat-1": "lost", "chat-2": "ready"}
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert substrate.stops == 1
    assert [one.id for one in await keeping.store.replicas()] == ["chat-2"]


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
