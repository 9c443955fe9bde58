"""A replica's pod, end to end: the emulated API's node runs the pod's own command as a process.

The pod has its own loopback address, as a pod has its IP; its environment comes from its Secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import KubernetesConfig
from ridgeline.fleet.substrates.kubernetes import KubernetesSubstrate
from ridgeline.fleet.substrates.kubernetes_pods import pod_name
from ridgeline.fleet.substrates.substrate import ReplicaSpec
from tests.fleet.substrates.emulated_kubernetes import NAMESPACE, TOKEN, EmulatedKubernetes
from tests.fleet.substrates.emulated_node import Node
from tests.fleet.substrates.marked import none_left
from tests.patience import PATIENCE_S

KEY = "a-key-of-replicas"


async def test_a_pod_s_own_command_serves_and_drains(smollm2_path: Path, tmp_path: Path) -> None:
    cluster = EmulatedKubernetes()
    await cluster.start()
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    config = KubernetesConfig(namespace=NAMESPACE, api=cluster.url, token_file=tmp_path / "token")
    spec = ReplicaSpec(
        fleet=uuid.uuid4().hex,
        id="m-1",
        model="m",
        version="v",
        source=str(smollm2_path),
        flags=("--served-model-name=m", "--kv-tokens=2048", "--threads=1"),
        environment={"RIDGELINE_API_KEYS": KEY},
        resources=ResourcesConfig(cpus=1),
    )
    substrate, node, name = (
        KubernetesSubstrate(config),
        Node(cluster, tmp_path),
        pod_name(spec.fleet, spec.id),
    )
    try:
        handle = await substrate.start(spec)
        await node.run(name)
        async with asyncio.timeout(PATIENCE_S):
            while not (url := (await substrate.poll(handle)).url):
                await asyncio.sleep(0.02)
        text = await asyncio.to_thread(completion, url)
        assert text
        obeying = asyncio.create_task(node.obey(name))
        await substrate.stop(handle, PATIENCE_S)
        assert await obeying == 0, (tmp_path / "log").read_text()
        assert (await substrate.poll(handle)).phase == "exited"
        assert none_left(spec.fleet)
    finally:
        if node.process is not None and node.process.poll() is None:
            os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
        await substrate.close()
        await cluster.close()


def completion(url: str) -> str:
    """One completion, with the key from the Secret, as soon as the server is ready."""
    body = json.dumps({"model": "m", "prompt": "One, two,", "max_tokens": 4}).encode()
    deadline = time.monotonic() + 2 * PATIENCE_S
    while True:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        try:
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
