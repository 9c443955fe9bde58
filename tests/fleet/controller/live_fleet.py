"""LiveFleet: a real fleet for tests: `ridgeline fleet up` as a process, its control API, its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.cli.fleet.control_client import ControlClient
from ridgeline.running import process_ticks
from tests.patience import PATIENCE_S

FILE = """
[fleet]
port = 0
state_dir = "{state_dir}"
drain_s = 20.0

[[models]]
name = "chat"
source = "smollm2-135m"
replicas = {replicas}
{serve}
[models.rollout]
canary_s = 0.5
canary_requests = 3
{more}
"""


SERVE = "[models.serve]\nkv_tokens = {kv_tokens}\nmax_context = 512\ndeterministic = true"


class LiveFleet:
    def __init__(self, folder: Path, replicas: int = 2, more: str = "", serve: str = SERVE) -> None:
        self.state_dir, self.file = folder / "state", folder / "fleet.toml"
        self._replicas, self._more, self._serve = replicas, more, serve
        self.write()
        self.client = ControlClient(self.state_dir)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "up.log"

    def write(self, kv_tokens: int = 2048) -> None:
        values = {"state_dir": self.state_dir, "replicas": self._replicas, "more": self._more}
        serve = self._serve.format(kv_tokens=kv_tokens)
        self.file.write_text(FILE.format(serve=serve, **values))

    def up(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "ridgeline.cli.main", "fleet", "up", str(self.file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.until(lambda: self.serving() >= self._replicas, "every replica serves")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A verb of `ridgeline fleet`."""
        command = [sys.executable, "-m", "ridgeline.cli.main", "fleet", *arguments]
        where = ["--state-dir", str(self.state_dir)]
        return subprocess.run([*command, *where], capture_output=True, text=True, timeout=300, check=False)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/fleet/status")
        return found

    def replicas(self, *states: str) -> list[dict[str, Any]]:
        return [one for one in self.status()["replicas"] if one["state"] in states]

    def serving(self) -> int:
        return len(self.serving_ids())

    def serving_ids(self) -> set[str]:
        return {one["id"] for one in self.replicas("ramping", "ready")}

    def until(self, holds: Callable[[], object], what: str, patience_s: float = 3 * PATIENCE_S) -> None:
        """Wait for what must come. The controller may be away for a moment."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if holds():
                    return
            except Exception:
                if time.monotonic() > deadline:
                    raise
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the controller ended: {self.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {patience_s:g} s: {what}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def ask(self, text: str, max_tokens: int = 8, model: str = "chat") -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3 * PATIENCE_S) as answer:
            return str(json.loads(answer.read())["choices"][0]["message"]["content"])

    @property
    def url(self) -> str:
        return str(self.status()["url"])

    def pids(self) -> list[int]:
        """Every process of this fleet but the controller: they name its state directory."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                environ = (folder / "environ").read_bytes()
            except OSError:
                continue
            mine = str(self.state_dir).encode() in command or self._mark() in environ
            is_controller = self.process is not None and int(folder.name) == self.process.pid
            if mine and not is_controller and process_ticks(int(folder.name)) is not None:
                found.append(int(folder.name))
        return found

    def _mark(self) -> bytes:
        return f"={self.fleet}/".encode() if self.fleet else b"\0no fleet\0"

    fleet = ""

    def pid_of(self, replica: str) -> int:
        wanted = f"--state-dir={self.state_dir}/replicas/{replica}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "cmdline").read_bytes().split(b"\0"):
                    return int(folder.name)
            except OSError:
                continue
        raise AssertionError(f"{replica} has no process")

    def kill_controller(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End what a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


class Load:
    """Requests, one after another on each of several threads, until told to stop."""

    def __init__(self, fleet: LiveFleet, threads: int) -> None:
        self._fleet, self.url = fleet, fleet.url
        self.answers = 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self._fleet.ask(f"Count {number} {self.answers}", max_tokens=12)
                self.answers += 1
            except urllib.error.HTTPError as error:
                self.failures.append(f"{error.code} {error.read()[:300]!r}")
            except Exception as error:
                self.failures.append(repr(error))
