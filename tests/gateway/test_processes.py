"""The gateway as processes: started by its command, drained, killed, reloaded; with real keys and clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.cli.main import main
from tests.gateway.stage import CHAT, asking
from tests.patience import PATIENCE_S


class Gateway:
    """`ridgeline gateway` before a mock upstream, both in separate processes."""

    def __init__(self, folder: Path, *lines: str, drain_s: float = PATIENCE_S) -> None:
        self.folder, self.drain_s = folder, drain_s
        self.mock = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.mock_upstream", "--port", "0"], stdout=subprocess.PIPE
        )
        assert self.mock.stdout is not None
        self.mock_url = self.mock.stdout.readline().decode().split()[-1]
        self.config = folder / "gateway.toml"
        self.write_config(*lines)
        self.start()

    def write_config(self, *lines: str, model: str = "*", target: str = "mock/*") -> None:
        gateway = [
            "port = 0",
            'log_format = "text"',
            f'state_dir = "{self.folder / "state"}"',
            f"drain_s = {self.drain_s}",
        ]
        text = ["[gateway]", *gateway, *lines, "[admin]", "port = 0"]
        text += ["[[upstreams]]", 'name = "mock"', 'kind = "ridgeline"', f'url = "{self.mock_url}"']
        text += ["[[models]]", f'name = "{model}"', f'targets = ["{target}"]']
        self.config.write_text("\n".join(text))

    def start(self) -> None:
        program = Path(sys.executable).parent / "ridgeline"
        self.process = subprocess.Popen(
            [program, "gateway", "--config", self.config], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.printed = b""
        until = time.monotonic() + PATIENCE_S
        while b"serving on" not in self.printed:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < until
            self.printed += line
        self.url = _word_after("serving on", self.printed)
        self.admin_url = _word_after("admin", self.printed)
        # Nobody else reads the log: a full pipe would stop the gateway.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # type: ignore[union-attr]

    def admin(self, method: str, path: str, **body: Any) -> httpx.Response:
        key = (self.folder / "state" / "admin-key").read_text().strip()
        options = {} if method == "GET" else {"json": body}
        return httpx.request(
            method,
            self.admin_url + path,
            headers={"authorization": f"Bearer {key}"},
            timeout=PATIENCE_S,
            **options,
        )

    def client(self) -> httpx.Client:
        """With its own key, once a worker knows it."""
        secret = self.admin("POST", "/admin/keys", name="test").json()["secret"]
        http = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {secret}"}, timeout=PATIENCE_S
        )
        until = time.monotonic() + PATIENCE_S
        while http.get("/v1/models").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        return http

    def books(self) -> dict[str, Any]:
        books: dict[str, Any] = httpx.get(f"{self.mock_url}/mock/books").json()["books"]
        return books

    def usage(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.admin("GET", "/admin/usage?by=outcome").json()
        return answer

    def end(self) -> None:
        for process in (self.process, self.mock):
            if process.poll() is None:
                process.kill()
            process.wait()


def _word_after(words: str, printed: bytes) -> str:
    return printed.decode().split(f"{words} ")[1].split()[0]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    running = Gateway(tmp_path)
    yield running
    running.end()


def streamed(http: httpx.Client, model: str, into: list[str]) -> threading.Thread:
    """A stream that is read in a thread; `into` gets its lines, and at last `end` or what broke it."""

    def read() -> None:
        try:
            with http.stream("POST", CHAT, json=asking(model, stream=True)) as answer:
                into.extend(line for line in answer.iter_lines() if line)
            into.append("end")
        except httpx.HTTPError as error:
            into.append(type(error).__name__)

    thread = threading.Thread(target=read)
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not into:
        assert time.monotonic() < until
        time.sleep(0.01)
    return thread


def test_a_key_works_as_soon_as_it_is_shown_and_ends_as_soon_as_it_is_revoked(gateway: Gateway) -> None:
    for number in range(4):
        made = gateway.admin("POST", "/admin/keys", name=f"key {number}").json()
        headers = {"authorization": f"Bearer {made['secret']}"}
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200
        gateway.admin("POST", f"/admin/keys/{made['id']}/revoke")
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 401


def test_sigterm_lets_a_stream_finish_and_its_row_is_written(gateway: Gateway) -> None:
    http = gateway.client()
    lines: list[str] = []
    thread = streamed(http, "mock_out60_pace20", lines)
    gateway.process.send_signal(signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert lines[-2:] == ["data: [DONE]", "end"]
    assert gateway.process.wait(PATIENCE_S) == 0
    gateway.start()
    (book,) = (one for one in gateway.books().values() if one["tokens_out"] == 60)
    rows = {row["group"]["outcome"]: row for row in gateway.usage()["data"]}
    assert rows["ok"]["tokens_out"] == book["tokens_out"]


def test_a_worker_that_dies_is_started_again_and_its_request_is_booked(gateway: Gateway) -> None:
    http = gateway.client()
    lines: list[str] = []
    thread = streamed(http, "mock_out20000_pace20", lines)
    pid = gateway.process.pid
    (worker,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    uploads = gateway.folder / "state" / "uploads" / f"0-{worker}"
    uploads.mkdir(parents=True)
    os.kill(worker, signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert lines[-1] != "end", "a stream that broke must not look whole"
    until = time.monotonic() + PATIENCE_S
    while True:  # until the next worker answers
        try:
            if http.post(CHAT, json=asking("mock_out2")).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < until
        time.sleep(0.1)
    (book,) = (one for one in gateway.books().values() if one["model"] == "mock_out20000_pace20")
    while "lost" not in (rows := {row["group"]["outcome"]: row for row in gateway.usage()["data"]}):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert rows["lost"]["tokens_out"] == book["tokens_out"] > 0
    assert not uploads.exists()  # removed before the next worker was started


def test_a_reload_takes_the_new_file_and_a_bad_one_is_refused(gateway: Gateway) -> None:
    http = gateway.client()
    assert http.post(CHAT, json=asking("fast")).status_code == 200
    gateway.write_config(model="fast", target="mock/mock_out3")
    assert gateway.admin("POST", "/admin/reload").status_code == 200
    last = http.post(CHAT, json=asking("fast"))
    # On a kept connection to the worker that leaves; that is closed already where the reload took long.
    told = (last.headers.get("connection"), last.json()["usage"]["completion_tokens"])
    assert told in (("close", 16), (None, 3))
    assert http.post(CHAT, json=asking("fast")).json()["usage"]["completion_tokens"] == 3
    assert http.post(CHAT, json=asking("other")).status_code == 404
    gateway.write_config(model="fast", target="mock/mock_out4")
    gateway.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + PATIENCE_S
    while http.post(CHAT, json=asking("fast")).json()["usage"]["completion_tokens"] != 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    gateway.config.write_text("[gateway]\nprot = 5")
    while (refused := gateway.admin("POST", "/admin/reload")).status_code == 503:
        assert time.monotonic() < until  # the one before is about to end
    assert refused.status_code == 400
    assert "did you mean 'port'" in refused.json()["error"]["message"]
    assert http.post(CHAT, json=asking("fast")).status_code == 200


def test_a_reload_whose_workers_cannot_start_leaves_the_gateway_as_it_was(gateway: Gateway) -> None:
    http = gateway.client()
    text = gateway.config.read_text()
    gateway.config.write_text(text.replace("url =", 'key_env = ["NOT_SET_ANYWHERE"]\nurl ='))
    refused = gateway.admin("POST", "/admin/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_configuration")
    assert http.post(CHAT, json=asking("mock_out2")).status_code == 200


def test_a_second_gateway_in_the_same_folder_is_refused_in_one_line(gateway: Gateway) -> None:
    program = Path(sys.executable).parent / "ridgeline"
    second = subprocess.run(
        [program, "gateway", "--config", gateway.config], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert second.returncode != 0
    assert "state_dir" in second.stderr
    assert second.stderr.count("\n") == 1


def test_the_admin_listener_shows_health_metrics_and_audit_and_needs_its_key(gateway: Gateway) -> None:
    http = gateway.client()
    http.post(CHAT, json=asking("mock_out4"))
    status = gateway.admin("GET", "/admin/upstreams").json()["data"]
    assert status["workers"]["0"]["upstreams"][0]["name"] == "mock"
    assert "ridgeline_gateway_requests_total" in gateway.admin("GET", "/metrics").text
    assert gateway.admin("GET", "/admin/audit").json()["data"][0]["action"] == "key.create"
    url = gateway.admin_url
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{gateway.url}/admin/keys").status_code == 404, "not on the clients' listener"
    key = http.headers["authorization"]
    assert httpx.get(f"{url}/admin/keys", headers={"authorization": key}).status_code == 401


def test_the_commands_find_the_only_gateway_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    for name in ("RIDGELINE_ADMIN_URL", "RIDGELINE_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    gateway = Gateway(tmp_path)
    try:
        assert main(["gateway", "keys", "create", "--name", "app", "--daily-usd", "0.00001"]) == 0
        shown = capsys.readouterr()
        assert "(app): $0.00001 a day" in shown.err
        headers = {"authorization": f"Bearer {shown.out.strip()}"}
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 200
        assert (
            main(["gateway", "keys", "list", "--admin-url", gateway.admin_url]) == 0
        )  # its key is found too
        assert main(["gateway", "usage"]) == 0
    finally:
        gateway.end()


def test_without_a_file_it_fronts_one_server_for_this_machine_alone(tmp_path: Path) -> None:
    gateway = Gateway.__new__(Gateway)
    gateway.mock = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.mock_upstream", "--port", "0"], stdout=subprocess.PIPE
    )
    assert gateway.mock.stdout is not None
    url = gateway.mock.stdout.readline().decode().split()[-1]
    program = Path(sys.executable).parent / "ridgeline"
    command = [program, "gateway", "--upstream", url, "--port", "0", "--admin-port", "0"]
    command += ["--state-dir", tmp_path / "s"]
    refused = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "open 0.0.0.0 to every client" in refused.stderr
    gateway.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert gateway.process.stdout is not None
        while (event := json.loads(gateway.process.stdout.readline()))["message"] != "serving":
            pass
        answer = httpx.post(event["url"] + CHAT, json=asking("mock_out2"), timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 2
        gateway.process.send_signal(signal.SIGTERM)
        for line in gateway.process.stdout:  # not a terminal, so nothing but JSON
            json.loads(line)
    finally:
        gateway.end()


def test_a_file_that_does_not_fit_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[gateway]\nworkers = 2\n")
    program = Path(sys.executable).parent / "ridgeline"
    done = subprocess.run([program, "gateway", "--config", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "[redis] url" in done.stderr
