"""What of a model must outlive the controller: the wanted number, its version, and a rollout under way.

A VersionSpec is all that a start of that version needs: the old version of a rollout can be
started again after fleet.toml has changed.
"""

from __future__ import annotations

import msgspec

from ridgeline.fleet.config_models import FleetModel, ServeValue
from ridgeline.fleet.controller.rollout import Phase
from ridgeline.fleet.substrates.substrate import ReplicaSpec

_StoredValue = str | int | float | bool | tuple[str, ...]


class VersionSpec(msgspec.Struct, frozen=True):
    version: str
    source: str
    serve: dict[str, _StoredValue]
    cpus: int | None = None


class StoredRollout(msgspec.Struct, frozen=True):
    new: VersionSpec
    phase: Phase


class ModelState(msgspec.Struct, frozen=True):
    target: int  # replicas wanted now
    current: VersionSpec
    rollout: StoredRollout | None = None
    refused: str = ""  # the version that the last rollout turned back from


def version_of(model: FleetModel) -> VersionSpec:
    return VersionSpec(model.version, model.source, dict(model.serve), model.resources.cpus)


def encode(state: ModelState) -> bytes:
    return msgspec.json.encode(state)


def decode(state: bytes) -> ModelState:
    return msgspec.json.decode(state, type=ModelState)


def replica_spec(
    fleet: str,
    id: str,
    model: FleetModel,
    version: VersionSpec,
    *,
    threads: int | None,
    key: str,
    drain_s: float,
) -> ReplicaSpec:
    """threads: for a version that names none. key: that the server accepts; never on its command line."""
    given = dict(version.serve)
    cpus = version.cpus or threads
    if cpus is not None:
        given.setdefault("threads", cpus)
    given.setdefault("log_format", "text")
    given["drain_s"] = drain_s
    flags = [f"--served-model-name={name}" for name in model.names]
    for name in sorted(given):
        flags += serve_flags(name, given[name])
    return ReplicaSpec(
        fleet=fleet,
        id=id,
        model=model.name,
        version=version.version,
        source=version.source,
        flags=tuple(flags),
        environment={"RIDGELINE_API_KEYS": key},
        resources=model.resources,
    )


def serve_flags(name: str, value: ServeValue) -> list[str]:
    """A value of [models.serve] as flags of `ridgeline serve`."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, tuple):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={value}"]
