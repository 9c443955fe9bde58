"""Another client, whose stream is to go on whatever happens: a separate process, so that what blocks the
test does not look as if it held up the server. `python -m tests.faults.listener URL` writes the moment of a
token, each, by the clock that all processes share, and a line of another kind if anything goes wrong.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


class Listener:
    def __init__(self, base_url: str, file: Path) -> None:
        self._file = file
        self._command = [sys.executable, "-m", "tests.faults.listener", base_url]

    def __enter__(self) -> Listener:
        self._process = subprocess.Popen(self._command, stdout=self._file.open("wb"), cwd=ROOT)
        deadline = time.monotonic() + PATIENCE_S
        while not self._file.stat().st_size:
            assert time.monotonic() < deadline, "no stream to begin with"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def longest_gap_s(self, since: float) -> float:
        """Between two tokens since then, the time until now included."""
        lines = self._file.read_text().splitlines()
        wrong = [line for line in lines if not line.startswith("at ")]
        assert wrong == [], "another client's stream was harmed"
        moments = [float(line.removeprefix("at ")) for line in lines[:-1]]
        times = [since, *(moment for moment in moments if moment >= since), time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


def listen(base_url: str) -> None:
    """One answer after the other, for ever."""
    body = {
        "messages": [{"role": "user", "content": "Write a very long story about a lighthouse."}],
        "max_tokens": 600,
        "ignore_eos": True,
        "stream": True,
    }
    url, headers = f"{base_url}/v1/chat/completions", {"content-type": "application/json"}
    while True:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            for line in answer:
                if b'"error"' in line:
                    print(line.decode(), flush=True)
                elif b'"content":"' in line:
                    print(f"at {time.monotonic()}", flush=True)


if __name__ == "__main__":
    try:
        listen(sys.argv[1])
    except Exception as error:
        print(repr(error), flush=True)
