"""An embedding server for one command: runs `ridgeline serve MODEL` as a child process on a free port.

For `ridgeline gateway routes` without a URL. Used over HTTP only; it stops with the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ridgeline.gateway.routing.embedder import EmbeddingFailed
from ridgeline.options import without_settings
from ridgeline.ports import free_port
from ridgeline.proxy.blocking_client import BlockingClient

READY_S = 300.0  # includes the download of a missing model
STOP_S = 10.0
POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


class OwnServer:
    """A context manager; `start` is called when the first vector is needed."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-router-")

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def start(self) -> str:
        """Its URL, once it answers."""
        folder = Path(self._folder.name)
        port = free_port()
        command = [sys.executable, "-P", "-m", "ridgeline.cli.main", "serve", self._model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--state-dir", str(folder / "state")]
        log_path = folder / "server.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=without_settings(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the command, which then stops the server
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        url = f"http://127.0.0.1:{port}"
        client = BlockingClient(url, timeout_s=5.0, direct=True)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                last = log_path.read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise EmbeddingFailed(f"`ridgeline serve {self._model}` ended: {' '.join(last)}")
            if client.is_ready("/ready"):
                return url
            time.sleep(POLL_S)
        raise EmbeddingFailed(f"`ridgeline serve {self._model}` was not ready within {READY_S:.0f} s")


def _end_with_parent() -> None:
    """Runs in the child: it stops when the command is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
