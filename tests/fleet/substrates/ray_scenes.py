"""Scenes on a real Ray cluster, each in its own process and network namespace: only loopback is up.

    unshare --user --map-root-user --net python -m tests.fleet.substrates.ray_scenes SCENE MODEL

Ray binds some listeners to every address whatever it is told; the namespace keeps them off the network.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import traceback
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import RayConfig
from ridgeline.fleet.substrates.ray import RaySubstrate
from ridgeline.fleet.substrates.substrate import Handle, Observed, ReplicaSpec
from tests.fleet.substrates.marked import marked, none_left

WAIT_S = 240.0
KEY = "a-key-of-replicas"


def spec(number: int, model: str, **resources: int) -> ReplicaSpec:
    return ReplicaSpec(
        fleet=FLEET,
        id=f"m-{number}",
        model="m",
        version="v1",
        source=model,
        flags=("--served-model-name=m", "--kv-tokens=2048", "--threads=1"),
        environment={"RIDGELINE_API_KEYS": KEY},
        resources=ResourcesConfig(**({"cpus": 1} | resources)),  # type: ignore[arg-type]
    )


FLEET = uuid.uuid4().hex


async def until(substrate: RaySubstrate, handle: Handle, right: Callable[[Observed], bool]) -> Observed:
    async with asyncio.timeout(WAIT_S):
        while not right(seen := await substrate.poll(handle)):
            assert seen.phase != "exited", (seen, (await substrate.logs(handle, 2000)).decode())
            await asyncio.sleep(0.1)
    return seen


async def answer(url: str) -> str:
    """One completion, as soon as the server is ready."""
    body = json.dumps({"model": "m", "prompt": "One, two,", "max_tokens": 4}).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

    def ask() -> str:
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as found:
            return str(json.load(found)["choices"][0]["text"])

    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await asyncio.to_thread(ask)
            except OSError:
                await asyncio.sleep(0.2)


async def one_machine(model: str) -> None:
    """On a cluster started here: start, request, log, death of server and actor, no room, stop."""
    substrate = RaySubstrate(RayConfig(cpus=2))
    first = await substrate.start(spec(1, model))
    seen = await until(substrate, first, lambda seen: bool(seen.url))
    assert seen.url.startswith("http://127.0.0.1:"), seen
    assert await answer(seen.url)
    log = await substrate.logs(first, 20_000)
    assert seen.url.removeprefix("http://").encode() in log, log
    assert (await substrate.capacity()).cpus == 2
    assert await substrate.find(FLEET) == [first]

    report = substrate._last[first.place]
    assert report.pid is not None
    os.kill(report.pid, signal.SIGKILL)
    seen = await until(substrate, first, lambda seen: seen.phase == "exited")
    assert (seen.exit_code, seen.reason[:8]) == (-9, "signal 9"), seen
    assert await substrate.logs(first, 100), "an ended replica's log is kept"
    assert none_left(FLEET)

    second = await substrate.start(spec(2, model))
    seen = await until(substrate, second, lambda seen: bool(seen.url))
    os.kill(substrate._last[second.place].actor_pid, signal.SIGKILL)
    seen = await until(substrate, second, lambda seen: seen.phase == "exited")
    assert "died" in seen.reason, seen
    assert none_left(FLEET), "the server outlived its actor"

    wide = await substrate.start(spec(3, model, gpus=1))
    seen = await until(substrate, wide, lambda seen: "GPU" in seen.reason)
    assert seen.phase == "pending", seen
    print("pending:", seen.reason)
    await substrate.stop(wide, 1.0)

    last = await substrate.start(spec(4, model))
    seen = await until(substrate, last, lambda seen: bool(seen.url))
    assert await answer(seen.url)
    assert len(marked(FLEET)) >= 2
    await substrate.stop(last, 30.0)
    assert none_left(FLEET)
    assert await substrate.find(FLEET) == []
    assert (await substrate.poll(last)).phase == "exited"
    await substrate.close()


async def two_nodes(model: str) -> None:
    """A replica outlives its controller's connection, and ends when its node is lost."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    config = RayConfig(address=cluster.address)
    first = RaySubstrate(config)
    handle = await first.start(spec(1, model))
    url = (await until(first, handle, lambda seen: bool(seen.url))).url
    await first.close()

    second = RaySubstrate(config)
    assert await second.find(FLEET) == [handle]
    assert (await until(second, handle, lambda seen: bool(seen.url))).url == url
    assert await answer(url)
    cluster.remove_node(node, allow_graceful=False)
    seen = await until(second, handle, lambda seen: seen.phase == "exited")
    print("lost:", seen.reason)
    assert "node" in seen.reason.lower(), seen
    assert none_left(FLEET), "the server outlived its node"
    again = await second.start(spec(2, model))
    seen = await until(second, again, lambda seen: bool(seen.reason))
    assert seen.phase == "pending", seen
    cluster.add_node(num_cpus=1)
    seen = await until(second, again, lambda seen: bool(seen.url))
    assert await answer(seen.url)
    await second.stop(again, 30.0)
    assert none_left(FLEET)
    await second.close()
    ray.shutdown()
    cluster.shutdown()


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        name = b"lo".ljust(16, b"\0")
        fcntl.ioctl(made, 0x8914, name + struct.pack("H14x", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running


if __name__ == "__main__":
    loopback_up()
    assert not [one for one in Path("/sys/class/net").iterdir() if one.name != "lo"] or os.getuid() == 0
    try:
        asyncio.run({"one_machine": one_machine, "two_nodes": two_nodes}[sys.argv[1]](sys.argv[2]))
    except BaseException:
        traceback.print_exc()  # before Ray's own end, which may abort the process
        sys.stderr.flush()
        os._exit(1)
    print("done")
