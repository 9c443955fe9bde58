"""`ridgeline ps`, `stop` and `models rm`: real processes, and records that outlive theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ridgeline import running as running_module
from ridgeline.cli.main import main
from ridgeline.models.files.known_models import KNOWN_MODELS
from ridgeline.models.files.registry import cached_file
from ridgeline.running import announced, is_alive, running
from tests.conftest import await_ready, start_server
from tests.patience import PATIENCE_S

# A process that keeps a record and ends at SIGTERM, after `finish_s`.
SERVER = """
import signal, sys, time
from ridgeline.running import announced
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
url, name, finish_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
with announced("server", url, [name], [name]) as set_state:
    set_state("ready")
    print("ready", flush=True)
    while not told:
        time.sleep(0.01)
    set_state("stopping")
    ended = time.monotonic() + finish_s
    while time.monotonic() < ended and len(told) < 2:
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ridgeline" / "run"


class Servers:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, port: int, name: str, finish_s: float = 0.0) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", SERVER, f"http://127.0.0.1:{port}", name, str(finish_s)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers()
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


def test_ps_lists_what_runs_and_stop_ends_it(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    process = servers.start(8001, "tiny")
    assert main(["ps"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["PID", "KIND", "STATE", "UP", "URL", "MODELS"]
    assert line.split()[:3] == [str(process.pid), "server", "ready"]
    assert line.split()[-2:] == ["http://127.0.0.1:8001", "tiny"]
    main(["ps", "--json"])
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["pid"], record["state"], record["names"]) == (process.pid, "ready", ["tiny"])
    assert main(["stop"]) == 0
    assert f"stopped server {process.pid}" in capsys.readouterr().err
    assert process.wait(PATIENCE_S) == 0
    main(["ps"])
    assert capsys.readouterr().out.startswith("No server or gateway is running")


@pytest.mark.parametrize("which", ["8002", "PID", "two", "http://127.0.0.1:8002/v1"])
def test_stop_takes_a_port_a_process_a_model_or_a_url(which: str, servers: Servers) -> None:
    first, second = servers.start(8001, "one"), servers.start(8002, "two")
    assert main(["stop", str(second.pid) if which == "PID" else which]) == 0
    assert second.wait(PATIENCE_S) == 0
    assert first.poll() is None
    assert [record.pid for record in running()] == [first.pid]


def test_stop_asks_which_of_several(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = servers.start(8001, "one"), servers.start(8002, "one")
    assert main(["stop"]) == 2
    assert "2 are running" in capsys.readouterr().err
    assert main(["stop", "one"]) == 2
    assert "may mean" in capsys.readouterr().err
    assert main(["stop", "9999"]) == 1
    assert "nothing that runs is '9999'" in capsys.readouterr().err
    assert main(["stop", "--all"]) == 0
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)
    assert main(["stop"]) == 1


def test_a_server_that_still_answers_is_reported_and_now_ends_it(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    process = servers.start(8001, "slow", finish_s=3600.0)
    assert main(["stop", "--timeout-s", "0.2"]) == 1
    assert "still runs after 0.2 s" in capsys.readouterr().err
    late = time.monotonic() + PATIENCE_S
    while [record.state for record in running()] != ["stopping"]:  # as soon as it has taken the signal
        assert time.monotonic() < late
        time.sleep(0.01)
    assert main(["stop", "--now"]) == 0
    process.wait(PATIENCE_S)  # far less than the hour that it asked for


def test_a_killed_servers_record_is_removed_by_the_next_reader(servers: Servers, own_records: Path) -> None:
    process = servers.start(8001, "tiny")
    process.kill()
    process.wait()
    assert len(list(own_records.iterdir())) == 1
    assert running() == []
    assert list(own_records.iterdir()) == []


def test_another_process_with_the_same_number_is_not_the_server(own_records: Path) -> None:
    with announced("server", "http://127.0.0.1:1", ["a"]):
        (record,) = running()
        assert record.pid == os.getpid()
        assert not is_alive(replace(record, ticks=record.ticks + 1))
        assert not is_alive(replace(record, place="another boot"))
        assert running_module.end(replace(record, ticks=record.ticks + 1), 1.0)  # and this process lives on
    assert list(own_records.iterdir()) == []


def test_a_record_of_another_machine_is_left_alone(own_records: Path) -> None:
    with announced("server", "http://127.0.0.1:1", ["a"]):
        (record,) = running()
    elsewhere = own_records / "7.json"
    elsewhere.write_text(json.dumps(asdict(replace(record, machine="elsewhere", pid=7))))
    assert running() == []
    assert elsewhere.exists()


def test_records_are_for_the_user_alone(own_records: Path) -> None:
    with announced("server", "http://127.0.0.1:1", ["a"]):
        (file,) = own_records.iterdir()
        assert (file.stat().st_mode & 0o777, own_records.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_home_that_cannot_be_written_does_not_stop_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with announced("server", "http://127.0.0.1:1", ["a"]) as set_state:
        set_state("ready")
        assert running() == []


def test_the_real_server_is_listed_and_stopped(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(tmp_path / "server.log", "--kv-tokens", "1024", "--threads", "1")
    try:
        await_ready(server)
        deadline = time.monotonic() + PATIENCE_S
        while [r.state for r in running()] != ["ready"] and time.monotonic() < deadline:
            time.sleep(0.05)
        (record,) = running()
        assert (record.pid, record.url, record.names) == (server.pid, server.base_url, ("smollm2-135m",))
        assert main(["models", "rm", "smollm2"]) == 1
        assert f"is served by server {server.pid}" in capsys.readouterr().err
        assert main(["stop", "smollm2-135m"]) == 0
        assert server.process.wait(PATIENCE_S) == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_rm_removes_a_model_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    file = cached_file(KNOWN_MODELS[0])
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3_000_000))
    assert main(["models", "rm", "smollm2"]) == 0
    assert capsys.readouterr().err == "removed smollm2-135m (3 MB)\n"
    assert [path.name for path in file.parent.iterdir()] == [".lock"]  # a pull may wait for it
    assert main(["models", "rm", "smollm2"]) == 1
    assert "is not in the cache" in capsys.readouterr().err


def test_rm_removes_a_hub_model_and_never_a_path(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "a").write_bytes(bytes(2_000_000))
    own = tmp_path / "model.gguf"
    own.write_bytes(b"")
    environ = {**os.environ, "HF_HOME": str(tmp_path)}

    def rm(name: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "ridgeline.cli.main", "models", "rm", name]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)

    assert rm("org/tiny").stderr == "removed org/tiny (2 MB)\n"
    assert not repo.exists()
    assert "is not in the cache" in rm("org/tiny").stderr
    assert "is a path" in rm(str(own)).stderr
    assert own.exists()
    assert "no model is called 'llama3'" in rm("llama3").stderr
