"""Substrate: starts, stops and watches replicas. The controller decides; a substrate only carries out.

A handle is enough to find a replica again after the controller's restart: the controller stores it. A replica
carries the names of its fleet and its own (`MARK`), so that `find` also returns one whose handle was lost.
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
    environment: Mapping[str, str]  # variables beyond the substrate's own; secrets among them
    resources: ResourcesConfig

    @property
    def mark(self) -> str:
        return f"{self.fleet}/{self.id}"


class Handle(msgspec.Struct, frozen=True):
    """A replica on its substrate. `place` is read by that substrate alone."""

    replica: str
    place: str


class Observed(msgspec.Struct, frozen=True):
    """What a substrate knows about a replica now. Readiness is not here: the controller asks the server."""

    phase: Phase
    url: str = ""  # once its port is known
    exit_code: int | None = None
    reason: str = ""  # why it is pending, or how it ended
    # Seconds of the start that the server cannot see: node, image, spawn.
    segments: Mapping[str, float] = {}


class Capacity(msgspec.Struct, frozen=True):
    """What replicas may use in all; None: unknown or unlimited."""

    cpus: float | None = None
    memory: float | None = None  # GiB
    gpus: int | None = None


class SubstrateError(Exception):
    """A substrate cannot do what was asked; the message says why."""


class Substrate(Protocol):
    async def start(self, spec: ReplicaSpec) -> Handle:
        """Begin a start and return. SubstrateError: it was refused, and nothing runs."""
        ...

    async def stop(self, handle: Handle, drain_s: float) -> None:
        """Let running requests finish for `drain_s` seconds, then end it. Returns once nothing of it runs."""
        ...

    async def poll(self, handle: Handle) -> Observed: ...

    async def logs(self, handle: Handle, last_bytes: int) -> bytes:
        """The end of its log."""
        ...

    async def find(self, fleet: str) -> Sequence[Handle]:
        """Every replica of this fleet that runs, also those that no handle is stored of."""
        ...

    async def capacity(self) -> Capacity: ...

    async def close(self) -> None:
        """Release connections. Replicas go on."""
        ...
