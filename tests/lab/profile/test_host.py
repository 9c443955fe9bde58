"""A running server's processes are sampled side by side, and its step records read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from ridgeline.lab.errors import LabError
from ridgeline.lab.profile.host import host_lines, profile_processes, read_steps
from tests.conftest import LiveServer
from tests.patience import PATIENCE_S


def generate(server: LiveServer, until: threading.Event) -> None:
    while not until.is_set():
        answer(server)


def answer(server: LiveServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        response.read()


@pytest.mark.usefixtures("py_spy")
def test_front_and_engine_are_sampled_while_they_serve(live_server: LiveServer, tmp_path: Path) -> None:
    sampled = threading.Event()
    load = threading.Thread(target=generate, args=(live_server, sampled))
    load.start()
    try:
        for seconds in (1, 3, 9):  # of a busy machine's engine a short look may see nothing
            found = profile_processes(live_server.pid, seconds, tmp_path, url=live_server.base_url)
            if all(process.samples for process in found.processes if process.role == "engine"):
                break
    finally:
        sampled.set()
        load.join()
    roles = {process.role: process for process in found.processes}
    assert {"front", "engine"} <= roles.keys()
    assert roles["engine"].samples > 0
    assert json.loads((tmp_path / f"engine-{roles['engine'].pid}.speedscope.json").read_text())["profiles"]
    assert found.steps is not None
    assert found.steps > 0
    text = "\n".join(host_lines(found))
    assert f"engine, process {roles['engine'].pid}" in text
    assert f"{found.steps} steps" in text


@pytest.mark.usefixtures("py_spy")
def test_a_child_that_cannot_be_sampled_is_told_and_spoils_nothing() -> None:
    program = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = profile_processes(process.pid, 1, None)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert [one.pid for one in found.processes] == [process.pid]
    assert "could not sample" in found.not_sampled[0]
    assert "not sampled: process" in "\n".join(host_lines(found))


def test_an_address_without_step_records_is_an_error_in_one_line() -> None:
    with pytest.raises(LabError, match="did not answer with step records"):
        read_steps("http://127.0.0.1:9")
