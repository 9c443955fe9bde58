"""The container file: what it copies exists, what it runs is accepted, and its build steps work here.

No container is built: that needs a daemon. The steps of the build are run as they are written, in a folder
that holds what the build would copy, except those that need root in an image (apt-get, useradd).
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy/container/Containerfile").read_text(encoding="utf-8")


def steps() -> list[tuple[str, str]]:
    """Instructions with their arguments, continued lines joined and comments left out."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in steps():
        if name == "FROM":
            found[rest.rpartition(" AS ")[2]] = [(name, rest)]
        elif found:
            found[list(found)[-1]].append((name, rest))
    return found


def argument(stage: str, instruction: str) -> str:
    return [rest for name, rest in stages()[stage] if name == instruction][-1]


def test_every_image_starts_from_one_pinned_version() -> None:
    (version,) = [rest for name, rest in steps() if name == "ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+", version)
    for name, (start, *_) in stages().items():
        known = ("${PYTHON_IMAGE}", "base")
        assert start[1].split()[0] in known, name


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_runs_without_root(stage: str) -> None:
    *_, last = stages()[stage]
    assert last == ("USER", "10001:10001")
    assert "--uid 10001" in argument("base", "RUN")


def test_a_build_without_a_target_makes_the_cpu_image() -> None:
    assert list(stages())[-1] == "cpu"


def test_what_is_copied_is_there_and_sent_to_the_build() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    for name, rest in steps():
        if name != "COPY" or rest.startswith("--from"):
            continue
        for copied in rest.split()[:-1]:
            assert (ROOT / copied).exists()
            assert copied in sent


def test_the_command_is_accepted(tmp_path: Path) -> None:
    arguments = [
        str(tmp_path / "keys") if "/run/" in word else word for word in json.loads(argument("base", "CMD"))
    ]
    (tmp_path / "keys").write_text("key\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.cli.main", *arguments, "--print-config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert tomllib.loads(done.stdout)["server"]["host"] == "0.0.0.0"


def test_the_extras_it_installs_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for stage in ("cpu-environment", "cuda-environment"):
        (names,) = re.findall(r"\.whl\)\[([\w,]+)\]", argument(stage, "RUN"))
        assert set(names.split(",")) <= set(extras)
        assert {"gateway", "grpc", "otel"} <= set(names.split(",")), "what deploy/ switches on"


def test_the_health_check_fails_without_a_server_and_passes_with_one() -> None:
    import http.server
    import threading

    command = json.loads(argument("base", "HEALTHCHECK").partition("CMD ")[2])
    command[0] = sys.executable

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        for path, right in (("/ready", True), ("/other", False)):
            variables = os.environ | {"HEALTH_URL": base + path}
            done = subprocess.run(command, env=variables, capture_output=True, timeout=300, check=False)
            assert (done.returncode == 0) is right
        server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_build_steps_of_the_cpu_image_make_an_environment_that_serves_help(tmp_path: Path) -> None:
    """`make wheel` from the copied files alone, then the install of the wheel, as the file says."""
    source = tmp_path / "src"
    source.mkdir()
    ignored = ("__pycache__", "*.so", "*.dylib")
    for name, rest in stages()["wheel"]:
        if name == "COPY":
            for copied in rest.split()[:-1]:
                if (ROOT / copied).is_dir():
                    shutil.copytree(ROOT / copied, source / copied, ignore=shutil.ignore_patterns(*ignored))
                else:
                    shutil.copy(ROOT / copied, source)
    for path in (source / "native/editable").iterdir():
        if not fnmatch.fnmatch(path.name, "CMakeLists.txt"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def run(text: str) -> None:
        here = text.replace("/opt/", f"{tmp_path}/").replace("/src/", f"{source}/")
        here = here.replace("python -m venv", f"{shlex.quote(sys.executable)} -m venv")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(here, shell=True, cwd=source, env=variables, check=True)

    run(argument("wheel", "RUN"))
    run(argument("cpu-environment", "RUN"))
    program = tmp_path / "ridgeline/bin/ridgeline"
    done = subprocess.run([program, "serve", "--help"], capture_output=True, text=True, check=True, cwd="/")
    assert "--api-key-file" in done.stdout
