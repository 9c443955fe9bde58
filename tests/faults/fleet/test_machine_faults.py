"""What a machine does to a fleet: its clock is set, its disk fills, a file is cut; and a roll is undone."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fleet.clock_shift import ClockShift
from tests.faults.fleet.streams import at_rest
from tests.fleet.controller.live_fleet import LiveFleet, Load

pytestmark = pytest.mark.slow
HOUR_S = 3600
SCALING = "[models.scaling]\nmin = 1\nmax = 2\nscale_down_delay_s = 600.0\n"


class Shifted:
    def __init__(self, fleet: LiveFleet, shift: ClockShift | None) -> None:
        self.fleet, self.shift = fleet, shift

    def events(self, after: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.fleet.client.get("/fleet/events", after=after)["events"]
        return found

    def newest(self) -> int:
        return int(self.events(-1)[-1]["id"])


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shifted]:
    """One fleet for all tests, each of which leaves two serving replicas of the first version."""
    folder = Path(tmp_path_factory.mktemp("fleet"))
    shift = ClockShift(folder) if ClockShift.can_be_built() else None
    live = LiveFleet(folder, more=SCALING)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (shift.environment if shift else {}).items():
            patch.setenv(name, value)
        live.up()
    live.fleet = live.status()["fleet"]
    try:
        yield Shifted(live, shift)
    finally:
        live.close()


def test_a_clock_that_is_set_by_an_hour_changes_nothing(on: Shifted) -> None:
    if on.shift is None:
        pytest.skip("needs a C compiler (cc)")
    fleet = on.fleet
    newest, before = on.newest(), fleet.status()
    processes = set(fleet.pids())
    with Load(fleet, threads=2) as load:
        for offset in (HOUR_S, -HOUR_S, 0):
            on.shift.set(offset)
            seen = load.answers
            time.sleep(4.0)  # leases are renewed, reports sent, decisions made
            fleet.until(lambda seen=seen: load.answers > seen + 2, "answers after the step")
    after = fleet.status()
    assert load.failures == []
    assert (after["fence"], after["pid"], after["routers_reporting"]) == (before["fence"], before["pid"], 1)
    assert set(fleet.pids()) == processes
    changes = {event["kind"] for event in on.events(newest)} - {"scale"}
    assert not changes & {"lost", "start", "drain", "ended", "orphan", "router", "adopt"}, changes
    assert not [event for event in on.events(newest) if "to 0" in event["text"]]
    fleet.until(lambda: at_rest(fleet), "no request and no KV block is left")


def test_a_roll_that_is_undone_in_its_middle_leaves_the_old_version(on: Shifted) -> None:
    fleet = on.fleet
    old = fleet.status()["models"][0]["version"]
    with Load(fleet, threads=2) as load:
        assert fleet.run("roll", "chat", "--set", "kv_tokens=4096").returncode == 0
        new = fleet.status()["models"][0]["rollout_to"]
        fleet.until(lambda: versions(fleet).get(new, 0) >= 1, "a replica of the new version serves")
        assert fleet.run("roll", "chat", "--back").returncode == 0
        fleet.until(lambda: versions(fleet) == {old: 2}, "the old version serves alone")
        fleet.until(lambda: not fleet.status()["models"][0]["rollout"], "the rollout is over")
    assert load.failures == []
    assert "rolled_back" in fleet.status()["models"][0]["last_rollout"]
    fleet.until(lambda: at_rest(fleet), "no request and no KV block is left")


def test_truncated_weights_are_refused_and_the_serving_replicas_go_on(
    on: Shifted, smollm2_path: Path, tmp_path: Path
) -> None:
    fleet = on.fleet
    old = fleet.status()["models"][0]["version"]
    broken = tmp_path / "half.gguf"
    with smollm2_path.open("rb") as whole:
        broken.write_bytes(whole.read(smollm2_path.stat().st_size // 2))
    newest = on.newest()
    with Load(fleet, threads=2) as load:
        rolled = fleet.run("roll", "chat", "--set", f"source={broken}", "--wait")
    assert (rolled.returncode, load.failures) == (1, []), rolled.stdout
    assert "failed to start" in rolled.stdout
    assert any("truncated" in event["text"] for event in on.events(newest) if event["kind"] == "lost")
    assert versions(fleet) == {old: 2}


def test_on_a_full_disk_nothing_is_started_and_the_fleet_serves_on(on: Shifted) -> None:
    fleet = on.fleet
    controller = fleet.status()["pid"]
    victim, survivor = sorted(fleet.serving_ids())
    known = {one["id"] for one in fleet.status()["replicas"]}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with Load(fleet, threads=2) as load:
        resource.prlimit(controller, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        try:
            os.kill(fleet.pid_of(victim), signal.SIGKILL)
            seen = load.answers
            fleet.until(lambda: load.answers > seen + 5, "answers of the other replica")
            assert fleet.status()["pid"] == controller  # it answers
            assert {one["id"] for one in fleet.status()["replicas"]} <= known
        finally:
            resource.prlimit(controller, resource.RLIMIT_FSIZE, unlimited)
        fleet.until(lambda: fleet.serving() == 2, "another replica serves")
    assert load.failures == []
    assert survivor in fleet.serving_ids()


def test_the_fleet_leaves_no_process(on: Shifted) -> None:
    assert on.fleet.run("down").returncode == 0
    assert on.fleet.pids() == []


def versions(fleet: LiveFleet) -> dict[str, int]:
    """Serving replicas of each version."""
    found: dict[str, int] = {}
    for one in fleet.replicas("ramping", "ready"):
        found[one["version"]] = found.get(one["version"], 0) + 1
    return found
