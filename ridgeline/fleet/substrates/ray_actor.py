"""ReplicaActor: runs on a Ray node for one replica. It starts `ridgeline serve` and reports its state.

Requests do not pass through it: they go to the server's port. The server runs below a guard process, which
ends it when the actor dies.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.substrates.substrate import MARK, ReplicaSpec
from ridgeline.options import without_settings
from ridgeline.running import running

BEGIN_S = 300.0  # seconds until the environment must arrive
KILL_GRACE_S = 5.0  # seconds added to the drain, for the last events of streams
POLL_S = 0.25


class Report(msgspec.Struct, frozen=True):
    """The state of an actor's server."""

    actor_pid: int
    pid: int | None
    url: str
    exit_code: int | None
    reason: str
    node: str  # address of the node


class ReplicaActor:
    def __init__(self, spec: bytes, host: str, command: Sequence[str] = ()) -> None:
        """spec: a ReplicaSpec in JSON, without its environment: Ray keeps the arguments of a detached actor
        for its whole life and shows them to other jobs. host: address to listen on; empty: the node's address
        in the Ray cluster. command: runs in place of `ridgeline serve`.
        """
        self._spec = msgspec.json.decode(spec, type=ReplicaSpec)
        self._made_at = monotonic()
        self._host, self._url, self._reason = host or _node_address(), "", ""
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._ended = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix=f"ridgeline-{self._spec.id}-"))
        self._log = self._folder / "server.log"
        self._line = tuple(command) or self._command()
        self._guard: subprocess.Popen[bytes] | None = None
        self._beginning = threading.Lock()

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the server with these variables, which hold the replicas' key. A second call does nothing."""
        with self._beginning:
            if self._guard is None and not self._ended.is_set():
                self._guard = self._start(self._line, environment)
                threading.Thread(target=self._read_reports, args=(self._guard,), daemon=True).start()

    def report(self) -> bytes:
        """A Report in JSON."""
        if self._guard is None and not self._reason and monotonic() - self._made_at > BEGIN_S:
            self._reason = (
                f"no key came within {BEGIN_S:.0f} s: its controller ended in the middle of the start"
            )
        if not self._url and self._pid is not None and not self._ended.is_set():
            self._url = next((one.url for one in running() if one.pid == self._pid), "")
        code, reason = self._exit_code, self._reason
        if self._ended.is_set() and not reason:
            how = f"exit code {code}" if code is not None and code >= 0 else f"signal {-(code or 0)}"
            lines = self.tail(2000).decode(errors="replace").strip().splitlines()
            reason = f"{how}; last line of its log: {lines[-1][:300]}" if lines else how
        return msgspec.json.encode(
            Report(
                os.getpid(), self._pid, self._url, code if self._ended.is_set() else None, reason, self._host
            )
        )

    def stop(self, drain_s: float) -> None:
        """SIGTERM, `drain_s` seconds to finish, then SIGKILL. Returns once nothing of the server runs."""
        if self._guard is not None and self._guard.stdin is not None and drain_s > 0:
            with contextlib.suppress(OSError):  # the guard has ended: so has the server
                self._guard.stdin.write(b"stop\n")
                self._guard.stdin.flush()
            clock = AwakeClock()
            until = clock() + drain_s + KILL_GRACE_S
            # While this process stood still, its server may have too: that time does not count.
            while clock() < until and not self._ended.wait(min(until - clock(), POLL_S)):
                pass
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """The guard sees the end of this pipe when this process dies."""
        with self._beginning:
            if self._guard is None:
                self._ended.set()
                return
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()
        self._ended.wait()

    def tail(self, last_bytes: int) -> bytes:
        """The end of the server's log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log.stat().st_size - last_bytes, 0))
                return file.read()
        except OSError:
            return b""

    def _command(self) -> tuple[str, ...]:
        spec = self._spec
        own = (f"--host={self._host}", "--port=0", f"--state-dir={self._folder / 'state'}")
        return (sys.executable, "-m", "ridgeline.cli.main", "serve", spec.source, *spec.flags, *own)

    def _start(self, command: Sequence[str], given: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = without_settings(os.environ) | dict(given) | {MARK: self._spec.mark}
        guard = (sys.executable, "-m", "ridgeline.fleet.substrates.ray_guard", str(self._log))
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _read_reports(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdout is not None
        began = monotonic()
        for line in guard.stdout:
            found = json.loads(line)
            self._pid = found.get("pid", self._pid)
            self._exit_code = found.get("exit", self._exit_code)
            self._reason = found.get("reason", self._reason)
        if self._exit_code is None:
            self._reason = f"its guard process died {monotonic() - began:.0f} s after the start"
        self._ended.set()


def _node_address() -> str:
    address: str = importlib.import_module("ray.util").get_node_ip_address()
    return address
