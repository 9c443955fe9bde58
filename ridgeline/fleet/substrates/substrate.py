"""Substrate: starts, stops and watches replicas. The controller decides; a substrate only acts.

A handle is enough to find a replica again after the controller's restart: the controller stores it. A replica
is marked with its fleet and its name (`MARK`), so that `find` also returns one whose handle was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from ridgeline.fleet.config_models import ResourcesConfig

MARK = "RIDGELINE_FLEET_REPLICA"  # variable, label or tag of a replica: FLEET/REPLICA
Phase = Literal["pending", "running", "exited"]


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What to start: `ridgeline serve` with these flags. A substrate adds --host, --port and --state-dir."""

    fleet: str  # random, one for each state directory
    id: str  # such as smollm2-3; never used again
    model: str
    version: str
    source: str  # MODEL of `ridgeline serve`
    flags: tuple[str, ...]  # --flag=value
    environment: Mapping[str, str]  # environment variables that the substrate adds to its own, with secrets
    resources: ResourcesConfig

    @property
    def mark(self) -> str:
        return f"{self.fleet}/{self.id}"


class Handle(msgspec.Struct, frozen=True):
    """A replica on its substrate. Only that substrate reads `place`."""

    replica: str
    place: str


class Observed(msgspec.Struct, frozen=True):
    """The state of a replica on its substrate. Readiness is not here: the controller asks the server."""

    phase: Phase
    url: str = ""  # once its port is known
    exit_code: int | None = None
    reason: str = ""  # why it is pending, or how it ended
    # Seconds of the start that the server cannot see: node, image, spawn.
    segments: Mapping[str, float] = {}


class Capacity(msgspec.Struct, frozen=True):
    """Resources for all replicas together. None: unknown, or without a limit."""

    cpus: float | None = None
    memory: float | None = None  # GiB
    gpus: int | None = None


class SubstrateError(Exception):
    """A substrate cannot do what was asked. The message says why."""


class Substrate(Protocol):
    async def start(self, spec: ReplicaSpec) -> Handle:
        """Begin a start and return. SubstrateError if it was refused; then nothing runs."""
        ...

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        """A replica that an earlier controller started and perhaps did not start completely.

        environment: as in its spec; None: it is about to be ended.
        """
        ...

    async def stop(self, handle: Handle, drain_s: float) -> None:
        """Let running requests finish for `drain_s` seconds, then end it. Returns once nothing of it runs."""
        ...

    async def poll(self, handle: Handle) -> Observed: ...

    async def logs(self, handle: Handle, last_bytes: int) -> bytes:
        """The end of its log."""
        ...

    async def find(self, fleet: str) -> Sequence[Handle]:
        """Every running replica of this fleet, also those without a stored handle."""
        ...

    async def capacity(self) -> Capacity:
        """What it has, free or in use."""
        ...

    def limits(self) -> Capacity:
        """What replicas together never get more of: the controller starts none without room. None: a replica
        without room is pending here."""
        ...

    async def close(self) -> None:
        """Release connections. Replicas keep running."""
        ...
