"""LocalSubstrate: replicas are processes on this machine, each on a port that the system chooses.

A replica has its own session: Ctrl-C at the controller does not reach it, and it outlives the controller. It
is found again by its process number and start time, or by the mark in its environment. Its log is a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.substrates.substrate import (
    MARK,
    Capacity,
    Handle,
    Observed,
    ReplicaSpec,
    SubstrateError,
)
from ridgeline.machine import compute_threads, memory_bytes
from ridgeline.options import without_settings
from ridgeline.running import process_place, process_ticks, running

KILL_GRACE_S = 5.0  # seconds added to the drain, for the last events of streams
POLL_S = 0.05
CACHE = "cache"  # in a replica's folder, with separate_caches
LONGEST_POLL_S = 1.0  # a longer one was a standstill of this process
PROC = Path("/proc")


class Place(msgspec.Struct, frozen=True):
    """The place of a Handle: enough to tell this process from every other."""

    pid: int
    ticks: int
    place: str  # boot and PID namespace
    log: str
    gpus: tuple[str, ...] = ()


class LocalSubstrate:
    def __init__(self, state_dir: Path, config: LocalConfig) -> None:
        self._state_dir, self._config = state_dir, config
        self._memory = config.memory or memory_bytes() / (1 << 30)
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # processes that this process started
        self._urls: dict[str, str] = {}
        self._spawned: dict[str, float] = {}
        self._gpus: dict[str, tuple[str, ...]] = {}  # in use, by replica

    async def start(self, spec: ReplicaSpec) -> Handle:
        folder = self._state_dir / "replicas" / spec.id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        logs = self._state_dir / "logs"
        logs.mkdir(exist_ok=True, mode=0o700)
        path = logs / f"{spec.id}.log"
        gpus = self._free_gpus(spec)
        environment = without_settings(os.environ) | dict(spec.environment) | {MARK: spec.mark}
        if self._config.separate_caches:
            environment["RIDGELINE_CACHE"] = str(folder / CACHE)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = (sys.executable, "-m", "ridgeline.cli.main", "serve", spec.source, *spec.flags)
        began = time.monotonic()
        try:
            with path.open("ab") as log:
                process = subprocess.Popen(  # returns once the program is loaded
                    [*command, "--host=127.0.0.1", "--port=0", f"--state-dir={folder}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise SubstrateError(f"{spec.id} cannot be started: {error}") from error
        self._children[process.pid] = process
        self._spawned[spec.id] = time.monotonic() - began
        self._gpus[spec.id] = gpus
        place = Place(process.pid, process_ticks(process.pid) or 0, process_place(), str(path), gpus)
        return Handle(spec.id, msgspec.json.encode(place).decode())

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        """Its GPUs are in use."""
        self._gpus[handle.replica] = _place(handle).gpus

    async def stop(self, handle: Handle, drain_s: float) -> None:
        place = _place(handle)
        left_s = 0.0
        if drain_s > 0:
            if self._is_first_stop(handle.replica):
                self._signal(place, signal.SIGTERM)
            left_s = drain_s + KILL_GRACE_S
        read_at = time.monotonic()
        while self._lives(place) and left_s > 0:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            # While this process stood still, the replica may have too: that time does not count.
            left_s -= min(now - read_at, LONGEST_POLL_S)
            read_at = now
        await self._end_session(place)
        await self._remove_cache(handle.replica)
        self._urls.pop(handle.replica, None)
        self._gpus.pop(handle.replica, None)

    async def poll(self, handle: Handle) -> Observed:
        place = _place(handle)
        if not self._lives(place):
            child = self._children.get(place.pid)
            await self._end_session(place)  # its engine must not outlive it
            # Not before: a process has ended when its first thread has, and has a code when its last one has.
            code = None if child is None else child.returncode
            await self._remove_cache(handle.replica)
            return Observed("exited", exit_code=code, reason=_ending(code, Path(place.log)))
        if handle.replica not in self._urls:
            record = next((one for one in running() if one.pid == place.pid), None)
            if record is None:
                return Observed("running", reason="it has not bound its port yet")
            self._urls[handle.replica] = record.url
        spawned = self._spawned.get(handle.replica)
        segments = {} if spawned is None else {"spawn": spawned}
        return Observed("running", self._urls[handle.replica], segments=segments)

    async def logs(self, handle: Handle, last_bytes: int) -> bytes:
        return _tail(Path(_place(handle).log), last_bytes)

    async def find(self, fleet: str) -> Sequence[Handle]:
        return await asyncio.to_thread(self._find, fleet)  # it reads files of every process

    def _find(self, fleet: str) -> list[Handle]:
        """The oldest process of each mark: a replica's engine inherits the mark of its server."""
        found: dict[str, tuple[int, int]] = {}
        for pid, replica in _marked(fleet):
            ticks = process_ticks(pid)
            if ticks is not None and (ticks, pid) < found.get(replica, (sys.maxsize, 0)):
                found[replica] = (ticks, pid)
        log = self._state_dir / "logs"
        return [
            Handle(
                replica,
                msgspec.json.encode(
                    Place(pid, ticks, process_place(), str(log / f"{replica}.log"), _gpus_of(pid))
                ).decode(),
            )
            for replica, (ticks, pid) in found.items()
        ]

    async def capacity(self) -> Capacity:
        limits = self.limits()
        return Capacity(limits.cpus or compute_threads(), limits.memory, limits.gpus)

    def limits(self) -> Capacity:
        """Replicas share the machine's processors, but not its memory."""
        return Capacity(self._config.cpus, self._memory, len(self._config.gpus))

    async def close(self) -> None:
        return None

    def _free_gpus(self, spec: ReplicaSpec) -> tuple[str, ...]:
        wanted = spec.resources.gpus
        used = {gpu for gpus in self._gpus.values() for gpu in gpus}
        free = [gpu for gpu in self._config.gpus if gpu not in used]
        if len(free) < wanted:
            raise SubstrateError(
                f"{spec.id} needs {wanted} GPUs; {len(free)} of [substrate.local] gpus are free"
            )
        return tuple(free[:wanted])

    async def _remove_cache(self, replica: str) -> None:
        folder = self._state_dir / "replicas" / replica / CACHE
        if self._config.separate_caches and folder.is_dir():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _lives(self, place: Place) -> bool:
        child = self._children.get(place.pid)
        if child is not None and child.poll() is not None:
            return False
        return place.place == process_place() and process_ticks(place.pid) == place.ticks

    def _is_first_stop(self, replica: str) -> bool:
        """Send SIGTERM unless an earlier controller has: a second one would end the replica at once."""
        told = self._state_dir / "replicas" / replica / "stopping"
        try:
            told.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            told.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _signal(self, place: Place, number: signal.Signals) -> None:
        """Signal this process only, never another one that got its number later."""
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(place.pid)
            try:
                if self._lives(place):
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    async def _end_session(self, place: Place) -> None:
        """Kill what is left of the replica's session: itself and its engine."""
        while left := _session(place.pid):  # a kill takes effect a moment later
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        while self._lives(place):
            self._signal(place, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        child = self._children.pop(place.pid, None)
        if child is not None:
            child.wait()


def _place(handle: Handle) -> Place:
    return msgspec.json.decode(handle.place, type=Place)


def _marked(fleet: str) -> list[tuple[int, str]]:
    """Processes of this user with the mark, and their replicas."""
    wanted = f"{MARK}={fleet}/".encode()
    found = []
    for folder in PROC.glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's process, or it has ended
            continue
        pid = int(folder.name)
        found += [(pid, one.removeprefix(wanted).decode()) for one in variables if one.startswith(wanted)]
    return found


def _session(leader: int) -> list[int]:
    """The live processes of a replica's session, whose leader may have ended. Others lack the mark."""
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != leader or fields[0] in "ZX":
                continue
            if f"{MARK}=".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _gpus_of(pid: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        for variable in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if variable.startswith(b"CUDA_VISIBLE_DEVICES="):
                return tuple(filter(None, variable.partition(b"=")[2].decode().split(",")))
    return ()


def _ending(code: int | None, log: Path) -> str:
    how = "it ended" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
    lines = _tail(log, 2000).decode(errors="replace").strip().splitlines()
    return f"{how}; last line of its log: {lines[-1][:300]}" if lines else how


def _tail(path: Path, last_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - last_bytes, 0))
            return file.read()
    except OSError:
        return b""
