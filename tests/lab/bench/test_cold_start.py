"""Cold starts of a server with known delays, and of servers that never come up; nothing outlives them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ridgeline.lab.bench.cold_starts import cold_start
from ridgeline.lab.bench.cold_starts.cold_start import (
    ColdStartConfig,
    ColdStarts,
    Start,
    cold_starts,
    one_start,
)
from ridgeline.lab.bench.cold_starts.report import cold_start_page, cold_start_text
from ridgeline.lab.errors import BadInput, LabError
from tests.patience import PATIENCE_S

# Opens its port after 50 ms, is ready after 150 ms more, answers the first request 100 ms after it came, and
# the next at once. It leaves a child that would sleep for a minute.
SERVER = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, pids = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(pids, "a").write(f"{child.pid}\\n")
time.sleep(0.05)
begun, asked = time.monotonic(), []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def log_message(self, *words): pass
    def answer(self, status, body=b""):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            self.answer(200 if time.monotonic() - begun > 0.15 else 503)
        elif self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "tiny"}]}')
        else:
            self.answer(404)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "tiny" and body["stream"]
        self.answer(200)
        time.sleep(0.0 if asked else 0.1); asked.append(1)
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
            self.wfile.flush()
        self.wfile.write(b'data: {"choices": [], "usage": {}}\\n\\ndata: [DONE]\\n\\n')

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(tmp_path: Path) -> list[str]:
    return [sys.executable, "-c", SERVER, "{port}", str(tmp_path / "pids")]


def is_gone(pid: int) -> bool:
    """Dead, or about to be: the kernel takes its moment, and a container's init may not reap."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_every_stage_is_stamped_and_what_was_spawned_is_gone_with_its_children(tmp_path: Path) -> None:
    config = ColdStartConfig(command(tmp_path), repeats=2)
    numbers = []
    found = cold_starts(config, lambda number, start: numbers.append(number))
    assert numbers == [0, 1, 2]  # 0 warms the page cache and is not counted
    assert len(found.starts) == 2
    assert found.page_cache.startswith("warm")
    for start in found.starts:
        assert start.failure == ""
        stamps = (start.port_open_s, start.ready_s, start.sent_s, start.first_token_s, start.second_token_s)
        seconds = [stamp for stamp in stamps if stamp is not None]
        assert len(seconds) == 5
        assert seconds == sorted(seconds)
        assert seconds[0] >= 0.05
        assert seconds[3] - seconds[2] >= 0.1
        assert start.warm_ttft_s is not None
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(children) == 3
    assert all(map(is_gone, children))
    text = cold_start_text(found)
    assert "spawn → first token" in text
    assert "2 starts; page cache warm" in text
    assert "TTFT of a second request" in cold_start_page(found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_the_starts_that_were_measured_and_no_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    config = ColdStartConfig(command(tmp_path), repeats=3, page_cache="as_is")
    found = cold_starts(config, lambda start, _: os.kill(os.getpid(), number))
    assert (len(found.starts), found.wanted) == (1, 3)
    assert "stopped early" in cold_start_text(found)
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_server_that_dies_is_reported_with_its_last_words() -> None:
    dying = [sys.executable, "-c", "import sys; sys.exit('no such <model>')", "{port}"]
    start = one_start(ColdStartConfig(dying))
    assert start.first_token_s is None
    assert start.failure == "the server ended with code 1; its last line: no such <model>"
    page = cold_start_page(ColdStarts("x", "warm", [start], 1))
    assert "no such &lt;model&gt;" in page
    with pytest.raises(LabError, match="did not start"):
        cold_starts(ColdStartConfig(dying, repeats=1))


def test_a_server_that_never_opens_its_port_and_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "STOP_S", 0.2)
    stubborn = ["sh", "-c", f"trap '' TERM; echo $$ > {tmp_path / 'pid'}; sleep 60; : {{port}}"]
    start = one_start(ColdStartConfig(stubborn, timeout_s=3.0))
    assert "its port was not open in time" in start.failure
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_commands_that_cannot_work_are_refused_before_anything_is_spawned() -> None:
    with pytest.raises(BadInput, match=r"\{port\}"):
        cold_starts(ColdStartConfig(["ridgeline", "serve"]))
    with pytest.raises(BadInput, match="cannot be run"):
        one_start(ColdStartConfig(["/nowhere/server", "{port}"]))
    with pytest.raises(BadInput, match="at least 1"):
        cold_starts(ColdStartConfig(["x", "{port}"], repeats=0))


def test_results_are_kept_as_json(tmp_path: Path) -> None:
    found = ColdStarts("x", "warm", [Start(port_open_s=0.5), Start(failure="dead")], 2)
    found.save(tmp_path / "deep" / "coldstart.json")
    assert '"port_open_s": 0.5' in (tmp_path / "deep" / "coldstart.json").read_text()
    assert "start 2: FAILED: dead" in cold_start_text(found)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise here")
def test_pages_that_cannot_be_dropped_are_said_to_be_not_dropped(tmp_path: Path) -> None:
    if os.access("/proc/sys/vm/drop_caches", os.W_OK):
        pytest.skip("here the machine's page cache can be dropped, and a test must not")
    with pytest.raises(LabError, match="--evict"):
        cold_starts(ColdStartConfig(["x", "{port}"], page_cache="dropped"))
