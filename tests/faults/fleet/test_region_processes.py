"""A region of real processes is killed or stopped under streams, and a controller restart keeps its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fleet.streams import at_rest, streams
from tests.fleet.controller.live_fleet import LiveFleet

pytestmark = pytest.mark.slow
DETERMINISTIC = "[models.serve]\nkv_tokens = 16384\nmax_context = 512\ndeterministic = true\n"
PLACES = """
[[models.places]]
region = "eu"
pool = "own"
[[models.places]]
region = "us"
[latency.eu]
us = 90
"""
STREAMS = 16


class TwoRegions(LiveFleet):
    def write(self, kv_tokens: int = 2048) -> None:
        super().write(kv_tokens)
        self.file.write_text(self.file.read_text().replace("[fleet]\n", '[fleet]\nregion = "eu"\n'))

    def places(self) -> dict[str, tuple[str, str]]:
        return {one["id"]: (one["region"], one["pool"]) for one in self.replicas("ramping", "ready")}

    def near(self) -> str:
        return next(id for id, (region, _) in self.places().items() if region == "eu")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRegions]:
    live = TwoRegions(Path(tmp_path_factory.mktemp("regions")), serve=DETERMINISTIC, more=PLACES)
    try:
        live.up()
        yield live
    finally:
        live.close()


def both_serve(fleet: TwoRegions) -> bool:
    return sorted(fleet.places().values()) == [("eu", "own"), ("us", "")]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_in_the_other_region(fleet: TwoRegions, signal_number: signal.Signals) -> None:
    fleet.until(lambda: both_serve(fleet), "a replica in each region")
    undisturbed = asyncio.run(streams(fleet.url, STREAMS, 60))
    pid = fleet.pid_of(fleet.near())
    try:
        got = asyncio.run(streams(fleet.url, STREAMS, 60, lambda: os.kill(pid, signal_number)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert [one.errors for one in got if one.errors] == []
    assert [one.told() for one in got] == [one.told() for one in undisturbed]
    fleet.until(lambda: both_serve(fleet) and at_rest(fleet), "the region is replaced, and nothing is left")


def test_a_controller_that_restarts_knows_the_regions_of_its_replicas(fleet: TwoRegions) -> None:
    fleet.until(lambda: both_serve(fleet), "a replica in each region")
    before = fleet.places()
    fleet.kill_controller()
    fleet.up()
    fleet.until(lambda: fleet.places() == before, "the same replicas at the same places")
    assert all(one["adopted"] for one in fleet.replicas("ramping", "ready"))
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []
