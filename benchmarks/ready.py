"""await_ready(): waits until a server that a benchmark started can take requests."""

from __future__ import annotations

import subprocess
import time
import urllib.request

START_S = 120.0


def await_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server at {url} did not become ready within {timeout_s:g} s")
