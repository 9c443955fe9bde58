"""Replicas that die or stand still under load: no stream is lost, and none changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fleet.streams import at_rest, streams
from tests.fleet.controller.live_fleet import LiveFleet

pytestmark = pytest.mark.slow
DETERMINISTIC = "[models.serve]\nkv_tokens = 16384\nmax_context = 512\ndeterministic = true\n"
STREAMS = 32


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    live = LiveFleet(Path(tmp_path_factory.mktemp("fleet")), serve=DETERMINISTIC)
    try:
        live.up()
        yield live
    finally:
        live.close()


def test_no_stream_is_lost_and_none_changes_when_a_replica_is_killed_ten_times(fleet: LiveFleet) -> None:
    undisturbed = asyncio.run(streams(fleet.url, STREAMS, 80))
    assert all(one.done and not one.errors for one in undisturbed)
    for turn in range(10):
        fleet.until(lambda: fleet.serving() == 2, "two replicas serve")
        victim = sorted(fleet.serving_ids())[turn % 2]
        pid = fleet.pid_of(victim)
        got = asyncio.run(streams(fleet.url, STREAMS, 80, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
        assert [one.errors for one in got if one.errors] == []
        assert sum(one.done for one in got) == STREAMS
        assert [one.told() for one in got] == [one.told() for one in undisturbed]
        assert all(len(one.ids) == 1 for one in got)
        fleet.until(lambda: at_rest(fleet), "no request and no KV block is left")


def test_streams_of_a_replica_that_stands_still_move_to_its_peer(fleet: LiveFleet) -> None:
    fleet.until(lambda: fleet.serving() == 2, "two replicas serve")
    undisturbed = asyncio.run(streams(fleet.url, STREAMS, 80))
    victim = sorted(fleet.serving_ids())[0]
    pid = fleet.pid_of(victim)
    try:
        got = asyncio.run(streams(fleet.url, STREAMS, 80, lambda: os.kill(pid, signal.SIGSTOP)))
    finally:
        with contextlib.suppress(ProcessLookupError):  # the controller has replaced it
            os.kill(pid, signal.SIGCONT)
    assert [one.errors for one in got if one.errors] == []
    assert [one.told() for one in got] == [one.told() for one in undisturbed]
    fleet.until(lambda: fleet.serving() == 2 and at_rest(fleet), "two replicas serve, and nothing is left")


def test_two_deaths_within_a_second_lose_no_stream(tmp_path: Path) -> None:
    live = LiveFleet(tmp_path, replicas=3, serve=DETERMINISTIC)
    try:
        live.up()
        undisturbed = asyncio.run(streams(live.url, STREAMS, 80))
        first, second, _ = [live.pid_of(one) for one in sorted(live.serving_ids())]

        def kill() -> None:
            os.kill(first, signal.SIGKILL)
            threading.Timer(0.7, os.kill, (second, signal.SIGKILL)).start()

        got = asyncio.run(streams(live.url, STREAMS, 80, kill))
        assert [one.errors for one in got if one.errors] == []
        assert [one.told() for one in got] == [one.told() for one in undisturbed]
        live.until(lambda: at_rest(live), "no request and no KV block is left")
    finally:
        live.close()


def test_the_fleet_leaves_no_process(fleet: LiveFleet) -> None:
    assert fleet.run("down").returncode == 0
    assert fleet.pids() == []
