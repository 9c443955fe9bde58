"""Two controllers on one state directory: killed, stopped and resumed while streams run. None is lost."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.faults.fleet.streams import stream
from tests.fleet.controller.live_fleet import LiveFleet
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


class Controllers:
    """Several `fleet up --standby` of one fleet."""

    def __init__(self, fleet: LiveFleet) -> None:
        self.fleet = fleet
        self.made: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "ridgeline.cli.main",
            "fleet",
            "up",
            str(self.fleet.file),
            "--standby",
        ]
        with self._log(len(self.made)).open("ab") as log:
            self.made.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.made[-1]

    def holder(self) -> int:
        """The process that holds the lease. Read from the file: a stopped controller answers nothing."""
        with sqlite3.connect(f"file:{self.fleet.state_dir}/fleet.db?mode=ro", uri=True) as file:
            return int(file.execute("SELECT pid FROM fleet_lease").fetchone()[0])

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return self._log(self.made.index(process)).read_text()

    def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 4 * PATIENCE_S
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time: {what}\n" + "\n".join(map(self.log_of, self.made)))
            time.sleep(0.1)

    def leads(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it holds the lease, answers, and both replicas serve."""
        self.until(lambda: self.holder() == process.pid, f"process {process.pid} takes the lease")
        assert self.fleet.process is None  # until() of the fleet watches no controller
        self.fleet.until(lambda: self.fleet.status()["pid"] == process.pid, "it answers")
        self.fleet.until(lambda: self.fleet.serving() == 2, "both replicas serve")

    def close(self) -> None:
        for process in self.made:
            process.kill()
            process.wait()

    def _log(self, number: int) -> Path:
        return self.fleet.file.parent / f"controller-{number}.log"


class Streams:
    """Four streams at a time, in a separate thread, until told to stop."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, False
        self.done = 0
        self.errors: list[object] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()

    async def _run(self) -> None:
        limits = aiohttp.ClientTimeout(total=5 * PATIENCE_S)
        async with aiohttp.ClientSession(timeout=limits) as session:
            await asyncio.gather(*(self._lane(session, lane) for lane in range(4)))

    async def _lane(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._stop:
            try:
                got = await stream(session, self._url, number, 40)
            except Exception as error:
                self.errors.append(repr(error))
                return
            self.errors += got.errors
            if not got.done:
                self.errors.append("a stream ended without [DONE]")
            self.done += 1


@pytest.fixture
def fleet(smollm2_path: Path, tmp_path: Path) -> Iterator[LiveFleet]:
    made = LiveFleet(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        control = f'control_host = "127.0.0.1"\ncontrol_port = {probe.getsockname()[1]}\ndrain_s'
    made.file.write_text(made.file.read_text().replace("drain_s", control))
    yield made
    made.close()


def test_a_standby_takes_over_from_a_killed_and_from_a_stopped_controller(fleet: LiveFleet) -> None:
    controllers = Controllers(fleet)
    try:
        first = controllers.start()
        controllers.until((fleet.state_dir / "controller.sock").exists, "the first controller runs")
        controllers.leads(first)
        fleet.fleet = fleet.status()["fleet"]
        replicas = {id: fleet.pid_of(id) for id in fleet.serving_ids()}
        with Streams(fleet.url) as streams:
            second = controllers.start()
            controllers.until(
                lambda: "standby: process" in controllers.log_of(second), "the second stands by"
            )
            first.kill()
            controllers.leads(second)
            first.wait()
            assert {id: fleet.pid_of(id) for id in fleet.serving_ids()} == replicas

            third = controllers.start()
            controllers.until(lambda: "standby: process" in controllers.log_of(third), "the third stands by")
            second.send_signal(signal.SIGSTOP)
            controllers.leads(third)
            # Routers have left the stopped controller's socket: the new one hears them.
            fleet.until(lambda: fleet.status()["routers_reporting"], "routers report to the new controller")
            second.send_signal(signal.SIGCONT)
            assert second.wait(4 * PATIENCE_S) == 1
            assert "lease passed to another controller" in controllers.log_of(second)

            controllers.until(
                lambda: "the control API also listens" in controllers.log_of(third), "its port is free"
            )

            # The old one has touched nothing: not the replicas, not the routers, not the new one's socket.
            assert {id: fleet.pid_of(id) for id in fleet.serving_ids()} == replicas
            assert (controllers.holder(), fleet.status()["pid"]) == (third.pid, third.pid)
            before = streams.done
            controllers.until(lambda: streams.done > before + 4 or streams.errors, "streams run on")
        assert streams.errors == []
        assert fleet.run("down").returncode == 0
        assert third.wait(4 * PATIENCE_S) == 0
        assert fleet.pids() == []
    finally:
        controllers.close()


def test_a_controller_that_stood_still_keeps_its_replicas(fleet: LiveFleet) -> None:
    """Longer than stall_s, and without a standby: it has heard no replica, and must not blame them."""
    fleet.file.write_text(fleet.file.read_text().replace("drain_s", "stall_s = 2.0\ndrain_s"))
    controllers = Controllers(fleet)
    try:
        only = controllers.start()
        controllers.until((fleet.state_dir / "controller.sock").exists, "the controller runs")
        controllers.leads(only)
        fleet.fleet = fleet.status()["fleet"]
        replicas = {id: fleet.pid_of(id) for id in fleet.serving_ids()}
        newest = fleet.client.get("/fleet/events", after=-1)["events"][-1]["id"]
        only.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        only.send_signal(signal.SIGCONT)
        assert fleet.run("scale", "chat", "3").returncode == 0  # it decides again
        fleet.until(lambda: fleet.serving() == 3, "a third replica serves")
        kinds = {event["kind"] for event in fleet.client.get("/fleet/events", after=newest)["events"]}
        assert "lost" not in kinds
        assert replicas.items() <= {id: fleet.pid_of(id) for id in fleet.serving_ids()}.items()
        assert fleet.run("down").returncode == 0
        assert fleet.pids() == []
    finally:
        controllers.close()
