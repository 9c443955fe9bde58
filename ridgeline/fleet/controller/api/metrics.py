"""The controller's metrics for Prometheus: replicas by state, targets, the segments of each cold start."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.fleet.controller.api.status import FleetStatus

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
        "Replicas that are wanted.",
        (({"model": model.name}, model.target) for model in status.models),
    )
    family(
        "crash_loop",
        "gauge",
        "1 while starts of a model fail again and again.",
        (({"model": model.name}, model.crash_loop) for model in status.models),
    )
    family(
        "rollout",
        "gauge",
        "1 while a rollout is under way.",
        (({"model": model.name}, bool(model.rollout)) for model in status.models),
    )
    family("routers", "gauge", "Routers that report.", [({}, status.routers_reporting)])
    family("table_generation", "counter", "Generation of the table.", [({}, status.generation)])
    family("lease_fence", "counter", "Fence of the lease.", [({}, status.fence)])
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
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
