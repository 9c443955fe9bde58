"""A real fleet for benchmarks: `ridgeline fleet up` as a process, its verbs, and its end.

Replicas are processes of this machine (substrate `local`). Leaving the context ends every one of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli.fleet.control_client import ControlClient

START_S = 300.0


class LiveFleet:
    """models: the [[models]] table of each name; serve: [models.serve] of all; tables: more TOML for each."""

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Mapping[str, object]],
        serve: Mapping[str, object],
        tables: str = "",
    ) -> None:
        self._folder, self._models, self._tables = folder, models, tables
        self.file, self.state_dir, self.log = folder / "fleet.toml", folder / "state", folder / "up.log"
        self.client = ControlClient(self.state_dir)
        self.process: subprocess.Popen[bytes] | None = None
        self.write(serve)

    def write(self, serve: Mapping[str, object]) -> None:
        """fleet.toml; `roll` takes a change over."""
        lines = ["[fleet]", "port = 0", f'state_dir = "{self.state_dir}"', 'log_level = "warning"']
        for name, table in self._models.items():
            lines += ["[[models]]", *_toml({"name": name, **table}), "[models.serve]", *_toml(serve)]
            lines += [self._tables]
        self.file.write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "ridgeline.cli.main", "fleet", "up", str(self.file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wanted = {name: table["replicas"] for name, table in self._models.items()}
        self.until(lambda: {name: len(self.serving(name)) for name in wanted} == wanted)

    def run(self, *arguments: str) -> None:
        """A verb of `ridgeline fleet`."""
        command = [sys.executable, "-m", "ridgeline.cli.main", "fleet", *arguments]
        done = subprocess.run([*command, "--state-dir", str(self.state_dir)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"fleet {' '.join(arguments)} failed: {done.stdout}{done.stderr}")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/fleet/status")
        return found

    def serving(self, model: str) -> dict[str, dict[str, Any]]:
        """By id: the replicas that take requests."""
        found = self.status()["replicas"]
        return {one["id"]: one for one in found if one["model"] == model and one["state"] in _SERVE}

    @property
    def key(self) -> str:
        """That the replicas themselves accept."""
        return (self.state_dir / "replica-key").read_text().strip()

    def until(self, holds: Callable[[], bool], patience_s: float = START_S) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(Exception):  # no socket yet
                if holds():
                    return
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the fleet does not serve: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(SystemExit):
            self.run("down")
        self.process.terminate()
        self.process.wait()


_SERVE = ("ramping", "ready")


@contextlib.contextmanager
def live_fleet(
    models: Mapping[str, Mapping[str, object]], serve: Mapping[str, object], tables: str = ""
) -> Iterator[LiveFleet]:
    with tempfile.TemporaryDirectory(prefix="ridgeline-bench-") as folder:
        fleet = LiveFleet(Path(folder), models, serve, tables)
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.close()


def _toml(values: Mapping[str, object]) -> list[str]:
    return [
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
        for name, value in values.items()
    ]
