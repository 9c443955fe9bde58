"""org/name means the Hugging Face hub: fetched through the real client from a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ridgeline.models.files.hub import hub_id
from ridgeline.server.process.setup import public_name

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "org/tiny": {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
    },
    "org/latent": {
        "config.json": b'{"model_type": "deepseek_v3", "kv_lora_rank": 512}',
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
    },
}


class Hub(BaseHTTPRequestHandler):
    """The repositories of FILES exist, org/gated needs agreement, everything else is not there."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        files = FILES.get(repo)
        if path.startswith("/api/models/org/gated"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/api/models/{repo}/tree"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{repo}"):
            siblings = [{"rfilename": name} for name in files]
            self._send(200, json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode())
        else:
            content = files[path.rpartition("/")[2]]
            self._send(200, content, {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ridgeline(*words: str, hub: str, home: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "PYTHONPATH": root}
    command = [sys.executable, "-m", "ridgeline.cli.main", *words]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_a_bare_id_is_fetched_without_pickles_and_stays_usable_without_the_hub(
    hub: str, tmp_path: Path
) -> None:
    first = ridgeline("models", "pull", "org/tiny", hub=hub, home=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    again = ridgeline("models", "pull", "org/tiny", hub="http://127.0.0.1:9", home=tmp_path)
    assert (again.returncode, again.stdout) == (0, first.stdout)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "org/absent",
            "there is no directory org/absent here, and the hub has no such model, or it is private",
        ),
        ("hf:org/absent", "hf:org/absent: the hub has no such model"),
        ("org/gated", "accept it at https://huggingface.co/org/gated, then set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(model: str, said: str, hub: str, tmp_path: Path) -> None:
    done = ridgeline("models", "pull", model, hub=hub, home=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [("models", "pull"), ("serve", "--port=0"), ("models", "inspect")])
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    words: tuple[str, ...], hub: str, tmp_path: Path
) -> None:
    done = ridgeline(*words, "org/latent", hub=hub, home=tmp_path)
    assert done.returncode == 1
    assert "the family 'deepseek_v3' is not supported" in done.stderr
    assert "The nearest supported family is" in done.stderr
    assert [path.name for path in tmp_path.rglob("config.json")] == ["config.json"]
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_serve_says_that_neither_the_path_nor_the_hub_is_there(tmp_path: Path) -> None:
    done = ridgeline(
        "serve", "org/tiny", "--port", "0", "--log-format", "text", hub="http://127.0.0.1:9", home=tmp_path
    )
    assert done.returncode == 1
    assert "there is no directory org/tiny here, and it could not be downloaded" in done.stderr
    assert "give its path instead" in done.stderr


def test_a_directory_of_that_path_comes_before_the_hub(hub: str, tmp_path: Path) -> None:
    (tmp_path / "org/tiny").mkdir(parents=True)
    done = ridgeline("models", "pull", "org/tiny", hub=hub, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 1
    assert "org/tiny: no config.json, so this is not a model directory" in done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", "org/name"),
        ("org/name@v1.2", "org/name@v1.2"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("hf:org/name", "org/name"),
        ("llama3", None),
        ("./org/name", None),
        ("../name", None),
        ("~/name", None),
        ("/org/name", None),
        ("org/name/more", None),
        ("models/tiny.gguf", None),
        ("plan/config.json", None),
    ],
)
def test_which_arguments_mean_the_hub(name: str, expected: str | None) -> None:
    assert hub_id(name) == expected


def test_clients_call_a_hub_model_by_its_whole_id() -> None:
    assert public_name("org/some.model") == public_name("hf:org/some.model") == "org/some.model"
