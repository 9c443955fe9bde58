"""The state of a model that outlives the controller: the target, its version, and a rollout in progress.

A VersionSpec is all that a start of that version needs: the old version of a rollout can still be
started after fleet.toml has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ridgeline.fleet.config_models import FleetModel, PlaceConfig, ServeValue
from ridgeline.fleet.controller.rollout import Phase
from ridgeline.fleet.substrates.substrate import ReplicaSpec

_StoredValue = str | int | float | bool | tuple[str, ...]


class VersionSpec(msgspec.Struct, frozen=True):
    version: str
    source: str
    serve: dict[str, _StoredValue]
    cpus: int | None = None
    memory: float | None = None
    gpus: int | None = None  # None: written by an earlier controller; those of fleet.toml count


class StoredRollout(msgspec.Struct, frozen=True):
    new: VersionSpec
    phase: Phase


class ModelState(msgspec.Struct, frozen=True):
    target: int  # replicas wanted now
    current: VersionSpec
    rollout: StoredRollout | None = None
    refused: str = ""  # the version that the last rollout failed to reach


def version_of(model: FleetModel) -> VersionSpec:
    needed = model.resources
    return VersionSpec(
        model.version, model.source, dict(model.serve), needed.cpus, needed.memory, needed.gpus
    )


def encode(state: ModelState) -> bytes:
    return msgspec.json.encode(state)


def decode(state: bytes) -> ModelState:
    return msgspec.json.decode(state, type=ModelState)


def replica_spec(
    fleet: str,
    id: str,
    model: FleetModel,
    version: VersionSpec,
    place: PlaceConfig | None = None,
    *,
    threads: int | None,
    key: str,
    drain_s: float,
    peers: Sequence[str] = (),
) -> ReplicaSpec:
    """threads: used if the version sets none. key: the server's bearer key; never on its command line.
    peers: replicas with the same files, as NAME=URL."""
    given = dict(version.serve)
    cpus = version.cpus or threads
    if cpus is not None:
        given.setdefault("threads", cpus)
    given.setdefault("log_format", "text")
    given["drain_s"] = drain_s
    flags = [f"--served-model-name={name}" for name in model.names]
    for name in sorted(given):
        flags += serve_flags(name, given[name])
    environment = replica_environment(model, key)
    if peers:
        environment["RIDGELINE_WEIGHT_PEERS"] = ",".join(peers)
    where = place or model.spread[0]
    resources = replace(model.resources, region=where.region, pool=where.pool)
    if version.gpus is not None:
        resources = replace(resources, cpus=version.cpus, memory=version.memory, gpus=version.gpus)
    return ReplicaSpec(
        fleet=fleet,
        id=id,
        model=model.name,
        version=version.version,
        source=version.source,
        flags=tuple(flags),
        environment=environment,
        resources=resources,
    )


def replica_environment(model: FleetModel, key: str) -> dict[str, str]:
    return {"RIDGELINE_API_KEYS": key, **model.weights.environment}


def serve_flags(name: str, value: ServeValue) -> list[str]:
    """A value of [models.serve] as flags of `ridgeline serve`."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, tuple):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={value}"]
