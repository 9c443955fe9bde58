"""The controller's metrics for Prometheus: replicas by state, targets, the segments of each cold start."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.fleet.controller.api.status import FleetStatus, ReplicaStatus
from ridgeline.fleet.controller.room import Needs
from ridgeline.fleet.substrates.substrate import Capacity
from ridgeline.replica.messages import WeightsFrom

STATES = ("starting", "ramping", "ready", "draining", "lost")


def metrics_text(status: FleetStatus) -> str:
    lines: list[str] = []

    def family(name: str, kind: str, help: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP ridgeline_fleet_{name} {help}", f"# TYPE ridgeline_fleet_{name} {kind}"))
        lines.extend(f"ridgeline_fleet_{name}{_labels(labels)} {value:g}" for labels, value in samples)

    counts = {
        (model.name, state): sum(one.model == model.name and one.state == state for one in status.replicas)
        for model in status.models
        for state in STATES
    }
    family(
        "replicas",
        "gauge",
        "Replicas by state.",
        (({"model": model, "state": state}, count) for (model, state), count in counts.items()),
    )
    family(
        "replicas_wanted",
        "gauge",
        "Target number of replicas.",
        (({"model": model.name}, model.target) for model in status.models),
    )
    family(
        "crash_loop",
        "gauge",
        "1 while the model's replicas fail to start several times in a row.",
        (({"model": model.name}, model.crash_loop) for model in status.models),
    )
    family(
        "rollout",
        "gauge",
        "1 during a rollout.",
        (({"model": model.name}, bool(model.rollout)) for model in status.models),
    )
    family(
        "capacity", "gauge", "Resources of the substrate, where they are known.", _amounts(status.capacity)
    )
    family("reserved", "gauge", "Resources that replicas reserve.", _amounts(status.reserved))
    family("routers", "gauge", "Routers that report to the controller.", [({}, status.routers_reporting)])
    family("table_generation", "gauge", "Generation of the newest table.", [({}, status.generation)])
    family("lease_fence", "gauge", "Fence of the controller's lease.", [({}, status.fence)])
    family(
        "cold_start_seconds",
        "gauge",
        "Seconds of each part of a replica's start.",
        (
            ({"model": one.model, "replica": one.id, "segment": segment}, spent)
            for one in status.replicas
            for segment, spent in one.segments.items()
        ),
    )
    fetched = [(one, one.weights) for one in status.replicas if one.weights is not None]
    family(
        "weights_fetched_bytes",
        "gauge",
        "Bytes of weights that a replica's start transferred, by source.",
        ((_origin(one, weights), weights.bytes) for one, weights in fetched),
    )
    family(
        "weights_fetched_bytes_per_second",
        "gauge",
        "Bandwidth of that transfer.",
        (
            (_origin(one, weights), weights.bytes / weights.seconds)
            for one, weights in fetched
            if weights.bytes and weights.seconds
        ),
    )
    family(
        "weights_link_bytes_per_second",
        "gauge",
        "Speed of the link of that transfer, where it is known.",
        (
            (_origin(one, weights), weights.limit_bytes_per_s)
            for one, weights in fetched
            if weights.limit_bytes_per_s
        ),
    )
    return "\n".join(lines) + "\n"


def _amounts(of: Capacity | Needs) -> Iterable[tuple[dict[str, str], float]]:
    memory_bytes = None if of.memory is None else of.memory * (1 << 30)
    for resource, value in (("cpus", of.cpus), ("memory_bytes", memory_bytes), ("gpus", of.gpus)):
        if value is not None:
            yield {"resource": resource}, value


def _origin(one: ReplicaStatus, weights: WeightsFrom) -> dict[str, str]:
    return {"model": one.model, "replica": one.id, "source": weights.source}


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
