"""The node of the emulated Kubernetes API: runs the pods' own commands as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ridgeline.fleet.substrates.kubernetes_pods import PORT
from ridgeline.options import without_settings
from tests.fleet.substrates.emulated_kubernetes import EmulatedKubernetes


def pod_address() -> str:
    """A loopback address on which the pods' port is free."""
    while True:
        address = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        with socket.socket() as made:
            try:
                made.bind((address, PORT))
                return address
            except OSError:
                continue


class Node:
    """Runs one pod: its arguments, with its address in place of 0.0.0.0 and a folder in place of /state."""

    def __init__(self, cluster: EmulatedKubernetes, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.process: subprocess.Popen[bytes] | None = None

    async def run(self, name: str) -> None:
        container = self._cluster.pods[name]["spec"]["containers"][0]
        variables = {one["name"]: one["value"] for one in container["env"]}
        for source in container["envFrom"]:
            variables |= self._cluster.secrets[source["secretRef"]["name"]]["stringData"]
        address = pod_address()
        arguments = [
            word.replace("0.0.0.0", address).replace("/state", str(self._folder))
            for word in container["args"]
        ]
        await self._cluster.scheduled(name)
        with (self._folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.cli.main", *arguments],
                env=without_settings(os.environ) | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        await self._cluster.running(name, address)

    async def obey(self, name: str) -> int:
        """Wait for the deletion, as the kubelet does: SIGTERM, the grace period, SIGKILL."""
        assert self.process is not None
        while "deletionTimestamp" not in self._cluster.pods[name]["metadata"]:
            await asyncio.sleep(0.02)
        self.process.send_signal(signal.SIGTERM)
        grace = self._cluster.pods[name]["metadata"]["deletionGracePeriodSeconds"]
        try:
            code = await asyncio.to_thread(self.process.wait, grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._cluster.logs[name] = (self._folder / "log").read_bytes()
        await self._cluster.remove(name)
        return code
