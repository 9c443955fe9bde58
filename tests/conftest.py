"""Shared by all tests: environment variables that must be set before torch and triton are imported, the real
model, the shared data, and a live server.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import hypothesis
import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port as free_port  # other modules take it from here

# An example may take any time: the machine may be busy. Every run draws the same examples, so that its result
# does not depend on chance; `--hypothesis-profile random` draws new ones.
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("ridgeline", deadline=None, derandomize=True, suppress_health_check=slow)
hypothesis.settings.register_profile("random", deadline=None, derandomize=False, suppress_health_check=slow)
hypothesis.settings.load_profile("ridgeline")

# A request that names no timeout has httpx's 5 s, which a busy machine exceeds.
_timeout = inspect.signature(httpx.get).parameters["timeout"].default
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = PATIENCE_S

pytest_plugins = ["tests.tiny_wheel"]

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def cuda_devices() -> int:
    """Asked of the driver itself: importing torch would cost every run of a few tests two seconds."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


if cuda_devices() == 0:  # Triton's kernels then run in its interpreter, on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")

READY_TIMEOUT_S = STOP_TIMEOUT_S = PATIENCE_S
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _logs_are_set_up_for_one_test() -> Iterator[None]:
    """A command that runs in this process sets up logs; the next test's command starts without them."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    for handler in root.handlers[:]:
        if handler not in before and handler.get_name() == "ridgeline":
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF, fetched on first use."""
    from ridgeline.models.files.pull import ensure

    return ensure("smollm2-135m").path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data kept beside the checkout: chat templates and model configurations of current families."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA} is not there; the tests that read it are skipped")
    return SHARED_DATA


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A real `ridgeline serve` process on a loopback port."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path
    grpc_port: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture(scope="session")
def live_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server for the whole run, with the real model; must drain and exit 0 at the end.

    Deterministic: tests compare answers that were computed in other batches, or found in the cache.
    """
    log = tmp_path_factory.mktemp("live_server") / "server.log"
    server = start_server(log, "--deterministic", grpc_port=free_port())
    try:
        await_ready(server)
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, f"not a clean stop:\n{log.read_text()}"
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def start_server(
    log: Path, *flags: str, models: tuple[str, ...] = ("smollm2-135m",), grpc_port: int = 0
) -> LiveServer:
    """Start `ridgeline serve` with these models on a free loopback port; the caller waits and stops it."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "ridgeline.cli.main",
        "serve",
        *models,
        "--port",
        str(port),
        *(("--grpc-port", str(grpc_port)) if grpc_port else ()),
        *flags,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    return LiveServer(f"http://127.0.0.1:{port}", process, log, grpc_port)


def await_ready(server: LiveServer, timeout_s: float = READY_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            pytest.fail(f"the server ended with code {code} before it was ready:\n{server.log.read_text()}")
        try:
            with urllib.request.urlopen(f"{server.base_url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    pytest.fail(f"the server was not ready within {timeout_s:.0f} s:\n{server.log.read_text()}")
