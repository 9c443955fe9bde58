"""`ridgeline fleet up` on the emulated Kubernetes API: real controller, routers and servers, no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ridgeline.options import without_settings
from tests.fleet.substrates.emulated_kubernetes import NAMESPACE, TOKEN, EmulatedKubernetes
from tests.fleet.substrates.emulated_node import Node
from tests.patience import PATIENCE_S

WAIT_S = 3 * PATIENCE_S
KEY = "a-client-s-key"


class Nodes:
    """Runs every pod that has its Secret, reports those that end, and obeys deletions."""

    def __init__(self, cluster: EmulatedKubernetes, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.nodes: dict[str, Node] = {}

    async def run(self) -> None:
        while True:
            for name in list(self._cluster.pods):
                if name not in self.nodes and name in self._cluster.secrets:
                    folder = self._folder / name
                    folder.mkdir()
                    self.nodes[name] = Node(self._cluster, folder)
                    await self.nodes[name].run(name)
                elif name in self.nodes:
                    await self._look(name, self.nodes[name])
            await asyncio.sleep(0.05)

    async def _look(self, name: str, node: Node) -> None:
        assert node.process is not None
        pod = self._cluster.pods[name]
        code = node.process.poll()
        if "deletionTimestamp" in pod["metadata"]:
            await node.obey(name)
        elif code is not None and pod["status"]["phase"] == "Running":
            await self._cluster.ended(name, 128 - code if code < 0 else code, "Error")

    def kill(self) -> None:
        for node in self.nodes.values():
            if node.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    cluster = EmulatedKubernetes()
    await cluster.start()
    made = Nodes(cluster, tmp_path)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    made.kill()
    await cluster.close()


def ask(url: str) -> str:
    body = json.dumps({"model": "m", "prompt": "One, two,", "max_tokens": 4}).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.slow
async def test_a_fleet_of_pods_answers_replaces_a_dead_one_and_ends(
    nodes: Nodes, smollm2_path: Path, tmp_path: Path
) -> None:
    cluster = nodes._cluster
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    (tmp_path / "fleet.toml").write_text(
        f"""
        [fleet]
        port = 0
        state_dir = "{tmp_path}/f"
        api_keys = ["{KEY}"]
        drain_s = 5.0

        [substrate]
        kind = "kubernetes"

        [substrate.kubernetes]
        namespace = "{NAMESPACE}"
        api = "{cluster.url}"
        token_file = "{tmp_path}/token"

        [[models]]
        name = "m"
        source = "{smollm2_path}"

        [models.serve]
        kv_tokens = 2048
        threads = 1
        """,
        encoding="utf-8",
    )
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridgeline.cli.main", "fleet", "up", str(tmp_path / "fleet.toml")),
        env=without_settings(os.environ),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    said: list[bytes] = []
    try:
        url = await asyncio.wait_for(served_at(controller, said), WAIT_S)
        reading = asyncio.create_task(drain(controller, said))
        assert await asyncio.to_thread(ask, url)
        (first,) = cluster.pods
        process = nodes.nodes[first].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(ask, url), "the next replica answers"
        assert len(nodes.nodes) == 2
        controller.terminate()
        assert await asyncio.wait_for(controller.wait(), WAIT_S) == 0, b"".join(said).decode()
        await reading
        assert cluster.pods == {}
        assert cluster.secrets == {}
    except BaseException:
        print(b"".join(said).decode())
        raise
    finally:
        if controller.returncode is None:
            controller.kill()
            await controller.wait()


async def served_at(controller: asyncio.subprocess.Process, said: list[bytes]) -> str:
    """From the controller's line for people or machines."""
    assert controller.stderr is not None
    while line := await controller.stderr.readline():
        said.append(line)
        with contextlib.suppress(ValueError, KeyError):
            return str(json.loads(line)["url"])
    raise AssertionError(b"".join(said).decode())


async def drain(controller: asyncio.subprocess.Process, said: list[bytes]) -> None:
    assert controller.stderr is not None
    while line := await controller.stderr.readline():
        said.append(line)
