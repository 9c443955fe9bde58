"""Connections of one address leave room for others, whatever the limit on open files is."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.web import open_files
from tests.gateway.mock_upstream import MockUpstream
from tests.gateway.stage import make_key, settings_for
from tests.patience import PATIENCE_S

HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"

# A worker's own start, with a limit on open files that is set before it runs.
WORKER = """
import resource, runpy, sys
soft, hard = int(sys.argv.pop(1)), int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
sys.argv[0] = "worker"
runpy.run_module("ridgeline.gateway.process.worker", run_name="__main__")
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 4096), (256, 256)])
async def test_half_open_heads_of_one_address_reset_no_other_client(
    tmp_path: Path, soft: int, hard: int
) -> None:
    from ridgeline.gateway.settings import to_json

    mock = await MockUpstream().start()
    settings = settings_for(
        tmp_path, mock, {"gateway": {"max_connections": 1000, "head_timeout_s": 10 * PATIENCE_S}}
    )
    settings.state_dir.mkdir(parents=True)
    _, secret = await make_key(settings)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", WORKER, str(soft), str(hard)]
        worker = subprocess.Popen(
            [*command, "--listener", str(listener.fileno()), "--number", "0"],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        opened: list[socket.socket] = []
        try:
            worker.stdin.write(to_json(settings) + b"\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == b"ready\n"
            worker.stdin.write(b"serve\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == b"serving\n"
            for _ in range(400):  # more than the files that one of the workers may open
                opened.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
                opened[-1].sendall(HALF_A_HEAD)
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2"), timeout=PATIENCE_S
            ) as http:
                headers = {"authorization": f"Bearer {secret}"}
                for _ in range(3):
                    answer = await http.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)
                    assert answer.status_code == 200
            told = opened[-1].recv(4096)  # the address has more than its part
            assert told.startswith(b"HTTP/1.1 503 ")
            assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        finally:
            for one in opened:
                one.close()
            worker.stdin.close()
            worker.wait(PATIENCE_S)
            await mock.stop()


def test_the_limit_on_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(None), wanted))
    assert open_files.allow_open_files(1000) == 1000
    assert open_files.allow_open_files(500) == 1000
    assert open_files.allow_open_files(10_000) == 4096
    assert limits == [4096, 4096]


def test_an_address_has_a_quarter_of_all_connections_by_default() -> None:
    from ridgeline.gateway.process.connection_limits import connection_limits

    assert connection_limits(GatewayConfig(max_connections=100)).per_address == 25
    assert connection_limits(GatewayConfig(max_connections_per_address=7)).per_address == 7
