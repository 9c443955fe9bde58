"""Routers: the router processes of the controller. They share one port, and outlive the controller.

A router that dies is started again. Routers of an earlier controller keep serving; the port is then bound a
second time (SO_REUSEPORT), for the successor of one that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.options import OptionError, without_settings
from ridgeline.running import process_ticks
from ridgeline.storage.errors import StorageError

log = logging.getLogger("ridgeline.fleet")

MARK = "RIDGELINE_FLEET_ROUTER"  # variable of a router's process: FLEET/NUMBER
RESTART_S = 1.0
POLL_S = 0.2
GRACE_S = 5.0  # added to drain_s
PROC = Path("/proc")


class RouterProcess:
    def __init__(self, number: int, pid: int, ticks: int, child: subprocess.Popen[bytes] | None) -> None:
        self.number, self.pid, self.ticks, self._child = number, pid, ticks, child

    @property
    def lives(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            return False
        return process_ticks(self.pid) == self.ticks

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)
            try:
                if self.lives:
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)


class Routers:
    """command: of a router process, for the descriptor of its listener. config: the line it reads first."""

    def __init__(
        self,
        fleet: str,
        count: int,
        listener: socket.socket,
        command: Callable[[int], Sequence[str]],
        config: Callable[[int], bytes],
        log_dir: Path,
        events: EventLog,
    ) -> None:
        self._fleet, self._count, self._listener = fleet, count, listener
        self._command, self._config, self._log_dir, self._events = command, config, log_dir, events
        self.processes: dict[int, RouterProcess] = {}

    async def start(self, adopted: Sequence[RouterProcess]) -> None:
        for one in adopted:
            if one.number < self._count:
                self.processes[one.number] = one
                await self._events.say("adopt", f"router {one.number} is adopted from an earlier controller")
            else:
                one.signal(signal.SIGTERM)
        for number in range(self._count):
            if number not in self.processes:
                self._start(number)

    async def watch(self) -> None:
        """Start routers again that die, until cancelled or LeaseLost."""
        not_before: dict[int, float] = {}
        while True:
            for number in range(self._count):
                process = self.processes.get(number)
                if process is not None and process.lives:
                    continue
                if process is not None:
                    del self.processes[number]
                    not_before[number] = time.monotonic() + RESTART_S
                    try:
                        await self._events.say("router", f"router {number} died; another one starts")
                    except StorageError as error:
                        log.error("router %d died; the event could not be stored: %s", number, error)
                if time.monotonic() >= not_before.get(number, 0.0):
                    self._start(number)
            await asyncio.sleep(POLL_S)

    async def end(self, drain_s: float) -> None:
        """Refuse new connections and let running requests finish."""
        self._listener.close()
        for process in self.processes.values():
            process.signal(signal.SIGTERM)
        clock = AwakeClock()  # while this process stood still, routers may have too
        until = clock() + drain_s + GRACE_S
        while any(one.lives for one in self.processes.values()):
            if clock() > until:
                self.kill()
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGKILL)

    def _start(self, number: int) -> None:
        descriptor = self._listener.fileno()
        environment = without_settings(os.environ) | {MARK: f"{self._fleet}/{number}"}
        with (self._log_dir / f"router-{number}.log").open("ab") as log:
            child = subprocess.Popen(
                list(self._command(descriptor)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        assert child.stdin is not None
        with contextlib.suppress(OSError), child.stdin:
            child.stdin.write(self._config(number))
        self.processes[number] = RouterProcess(number, child.pid, process_ticks(child.pid) or 0, child)


def find_routers(fleet: str) -> list[RouterProcess]:
    """The routers of this fleet that run."""
    wanted = f"{MARK}={fleet}/".encode()
    found = []
    for folder in PROC.glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            number = variable.removeprefix(wanted).decode(errors="replace")
            pid = int(folder.name)
            if variable.startswith(wanted) and number.isdigit() and (ticks := process_ticks(pid)) is not None:
                found.append(RouterProcess(int(number), pid, ticks, None))
    return found


def bind(host: str, port: int, is_shared: bool) -> socket.socket:
    """Bind the port; a router listens on it. is_shared: routers of this fleet already hold the port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not is_shared:  # with SO_REUSEPORT alone, another fleet's port would be shared silently
            with socket.socket(found[0], socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(found[4])
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(found[4])
    except OSError as error:
        raise OptionError(f"[fleet] cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
