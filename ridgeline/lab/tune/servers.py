"""TunedServer: one `ridgeline serve` with the settings of a run, started for it and stopped after it.

A separate process on a free port; the lab reaches it only over HTTP. A server that refuses its settings or
dies raises NotMeasured with the reason from its log and never ends the search. It ends with the tuner.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.lab.tune.climb import NotMeasured
from ridgeline.lab.tune.ledger import Settings
from ridgeline.options import without_settings
from ridgeline.ports import free_port
from ridgeline.proxy.blocking_client import BlockingClient

POLL_S = 0.1
STOP_S = 20.0  # then it is killed
_PR_SET_PDEATHSIG = 1
_LOG_LEVELS = ("warning", "error", "critical")


class TunedServer:
    """A context manager: inside it the server answers at `url`."""

    def __init__(self, model: str, settings: Settings, folder: Path, ready_s: float = 180.0) -> None:
        self._folder = folder
        self._ready_s = ready_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.toml"
        config.write_text(engine_toml({"model": model} | settings), encoding="utf-8")
        self._command = [sys.executable, "-P", "-m", "ridgeline.cli.main", "serve", "--config", str(config)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--drain-s", "1"]
        self._command += ["--state-dir", str(folder / "state")]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TunedServer:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=without_settings(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to the tuner, which stops the server
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        """NotMeasured if it has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise NotMeasured("died", f"the server ended ({_how(code)}): {last_words(self.log)}")

    def stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _await_ready(self) -> None:
        assert self._process is not None
        client = BlockingClient(self.url, timeout_s=5.0, direct=True)
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise NotMeasured("refused", last_words(self.log) or f"the server ended ({_how(code)})")
            if client.is_ready("/ready"):
                return
            time.sleep(POLL_S)
        raise NotMeasured("refused", f"it was not ready within {self._ready_s:.0f} s: {last_words(self.log)}")


def engine_toml(settings: Settings) -> str:
    """A file for `ridgeline serve --config`."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if value is not None]
    return "\n".join(["[engine]", *lines, ""])


def last_words(log: Path) -> str:
    """The last line of a server's log that reports an error, else the last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # Also in JSON format: the reason is in the previous line.
    lines = [line for line in lines if not _message(line).endswith("its reason is above")]
    words = [text for line in lines if (text := _message(line))]
    wrong = [text for line in lines if _is_wrong(line) and (text := _message(line))]
    return (wrong or words or [""])[-1]


def _message(line: str) -> str:
    """The text of a line, logged as JSON or plain."""
    fields = _fields(line)
    text = str(fields.get("message") or fields.get("msg") or fields.get("event") or "") if fields else line
    return text.strip().removeprefix("ridgeline: ")


def _is_wrong(line: str) -> bool:
    fields = _fields(line)
    if fields:
        return str(fields.get("level", "")).lower() in _LOG_LEVELS
    return line.startswith("ridgeline: ") or "error" in line.lower()


def _fields(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    """In the child: a killed tuner leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
