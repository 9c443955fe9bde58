"""ReplicaActor: what runs on a Ray node for one replica. It starts `ridgeline serve` and reports about it.

Not a part of the request's path: requests go to the server's own port. The server runs below a guard process,
which ends it when the actor dies.
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
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import msgspec

from ridgeline.fleet.substrates.substrate import MARK, ReplicaSpec
from ridgeline.options import without_settings
from ridgeline.running import running

KILL_GRACE_S = 5.0  # beyond the drain, for the last events of streams


class Report(msgspec.Struct, frozen=True):
    """What an actor knows about its server."""

    actor_pid: int
    pid: int | None
    url: str
    exit_code: int | None
    reason: str
    node: str  # address of the node


class ReplicaActor:
    def __init__(self, spec: bytes, host: str, command: Sequence[str] = ()) -> None:
        """spec: a ReplicaSpec in JSON. host: address to listen on; empty: the node's own in the
        Ray cluster. command: in place of `ridgeline serve`.
        """
        self._spec = msgspec.json.decode(spec, type=ReplicaSpec)
        self._host, self._url, self._reason = host or _node_address(), "", ""
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._ended = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix=f"ridgeline-{self._spec.id}-"))
        self._log = self._folder / "server.log"
        self._guard = self._start(tuple(command) or self._command())
        self._reader = threading.Thread(target=self._read_reports, daemon=True)
        self._reader.start()

    def report(self) -> bytes:
        """A Report in JSON."""
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
        assert self._guard.stdin is not None
        if drain_s > 0:
            with contextlib.suppress(OSError):  # the guard has ended: so has the server
                self._guard.stdin.write(b"stop\n")
                self._guard.stdin.flush()
            self._ended.wait(drain_s + KILL_GRACE_S)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """The end of the pipe is what the guard sees when this process dies."""
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

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = without_settings(os.environ) | dict(self._spec.environment) | {MARK: self._spec.mark}
        guard = (sys.executable, "-m", "ridgeline.fleet.substrates.ray_guard", str(self._log))
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _read_reports(self) -> None:
        assert self._guard.stdout is not None
        began = monotonic()
        for line in self._guard.stdout:
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
