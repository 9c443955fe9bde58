"""Scenes on a real Ray cluster, each in its own process and network namespace: only loopback is up.

    unshare --user --map-root-user --net python -m tests.fleet.substrates.ray_scenes SCENE MODEL

Ray binds some listeners to every address whatever it is told; the namespace keeps them off the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import traceback
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import RayConfig
from ridgeline.fleet.substrates.ray import RaySubstrate
from ridgeline.fleet.substrates.substrate import MARK, Handle, Observed, ReplicaSpec
from ridgeline.options import without_settings
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


async def whole_fleet(model: str) -> None:
    """`ridgeline fleet up`: a request through the router, death of an actor, a replacement, the end."""
    folder = Path(tempfile.mkdtemp(prefix="rl"))
    (folder / "fleet.toml").write_text(
        f"""
        [fleet]
        port = 0
        state_dir = "{folder}/f"
        api_keys = ["{KEY}"]
        drain_s = 5.0

        [substrate]
        kind = "ray"

        [substrate.ray]
        cpus = 2

        [[models]]
        name = "m"
        source = "{model}"

        [models.serve]
        kv_tokens = 2048
        threads = 1
        """,
        encoding="utf-8",
    )
    log = folder / "log"
    with log.open("wb") as file:
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ridgeline.cli.main", "fleet", "up", str(folder / "fleet.toml")),
            env=without_settings(os.environ),
            stdout=file,
            stderr=file,
        )
    async with asyncio.timeout(WAIT_S):
        while not (found := re.search(r'"url": ?"(http[^"]+)"', log.read_text())):
            assert controller.returncode is None, log.read_text()
            await asyncio.sleep(0.1)
    assert await answer(found[1])
    (fleet,) = {mark.partition("/")[0] for mark in marks()}
    (actor,) = children_of_ray()
    os.kill(actor, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while f"{fleet}/m-2" not in marks():
            await asyncio.sleep(0.1)
    assert await answer(found[1]), "the next replica answers"
    controller.terminate()
    code = await controller.wait()
    assert code == 0, (code, log.read_text())
    assert "SIGTERM received" not in log.read_text()
    assert "_ray_timestamp" not in log.read_text()
    assert none_left(fleet), marks()


def marks() -> set[str]:
    """Of the replicas' processes in this network namespace."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
                continue
            for one in (folder / "environ").read_bytes().split(b"\0"):
                if one.startswith(f"{MARK}=".encode()):
                    found.add(one.partition(b"=")[2].decode())
    return found


def children_of_ray() -> list[int]:
    """Actors of replicas in this network namespace, by the title that Ray gives them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            same = (folder / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
            if same and b"ray::ReplicaActor" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        name = b"lo".ljust(16, b"\0")
        fcntl.ioctl(made, 0x8914, name + struct.pack("H14x", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running


SCENES = {"one_machine": one_machine, "two_nodes": two_nodes, "whole_fleet": whole_fleet}

if __name__ == "__main__":
    loopback_up()
    try:
        asyncio.run(SCENES[sys.argv[1]](sys.argv[2]))
    except BaseException:
        traceback.print_exc()  # before Ray's own end, which may abort the process
        sys.stderr.flush()
        os._exit(1)
    print("done")
