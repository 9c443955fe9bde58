"""Pods of replicas: makes the manifest of a pod, and reads its status. Pure: makes no call.

A replica is a pod that is never restarted: the controller starts another one with a new name. Its
environment, which holds the replicas' key, is a Secret that Kubernetes removes with the pod.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ridgeline.fleet.config_substrates import KubernetesConfig, pairs
from ridgeline.fleet.substrates.substrate import MARK, Observed, ReplicaSpec

PORT = 8000
USER = 10_001  # of the image: deploy/container/Containerfile
FLEET, REPLICA, MODEL = "ridgeline/fleet", "ridgeline/replica", "ridgeline/model"
SELECT = "app.kubernetes.io/component=replica"
REGION, POOL = "topology.kubernetes.io/region", "ridgeline/pool"

Object = dict[str, Any]


def pod_name(fleet: str, replica: str) -> str:
    """The pod's name, the same for every try: a start that is sent twice makes one pod."""
    name = re.sub(r"[^a-z0-9-]+", "-", f"ridgeline-{fleet[:8]}-{replica}".lower()).strip("-")
    if len(name) > 63:
        name = f"{name[:54].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def pod(spec: ReplicaSpec, config: KubernetesConfig) -> Object:
    """The manifest of a replica's pod."""
    name = pod_name(spec.fleet, spec.id)
    selector = pairs(config.node_selector, "[substrate.kubernetes] node_selector", str)
    if spec.resources.region:
        selector[REGION] = spec.resources.region
    if spec.resources.pool:
        selector[POOL] = spec.resources.pool
    body: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": config.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, config, name)],
        "volumes": [_cache(config), *({"name": one, "emptyDir": {}} for one in ("state", "tmp")), _SHM],
    }
    if selector:
        body["nodeSelector"] = selector
    if config.tolerations:
        body["tolerations"] = [_toleration(text) for text in config.tolerations]
    if config.pull_secrets:
        body["imagePullSecrets"] = [{"name": secret} for secret in config.pull_secrets]
    if config.runtime_class:
        body["runtimeClassName"] = config.runtime_class
    if config.priority_class:
        body["priorityClassName"] = config.priority_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/name": "ridgeline",
                "app.kubernetes.io/component": "replica",
                FLEET: label(spec.fleet),
                REPLICA: label(spec.id),
                MODEL: label(spec.model),
            },
            "annotations": {
                "ridgeline/mark": spec.mark,
                "ridgeline/version": spec.version,
                "prometheus.io/scrape": "true",
                "prometheus.io/port": str(PORT),
            },
        },
        "spec": body,
    }


def secret(made: Object, environment: Mapping[str, str]) -> Object:
    """The Secret with a pod's environment. The pod owns it: they are removed together."""
    metadata = made["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "labels": dict(metadata.get("labels", {})),
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": dict(environment),
    }


def observed(found: Object) -> Observed:
    """Read the state of the replica from its pod's status."""
    status = found.get("status", {})
    phase = status.get("phase", "Pending")
    container: Object = next(iter(status.get("containerStatuses", [])), {})
    state = container.get("state", {})
    segments = _segments(found, state)
    if phase in ("Succeeded", "Failed") or "terminated" in state:
        ended = state.get("terminated", {})
        why = ended.get("reason") or status.get("reason") or phase
        message = ended.get("message") or status.get("message") or ""
        return Observed("exited", "", ended.get("exitCode"), _sentence(why, message), segments)
    if lost := _node_lost(status):
        return Observed("exited", reason=lost, segments=segments)
    if phase == "Running" and "running" in state and status.get("podIP"):
        address = str(status["podIP"])
        host = f"[{address}]" if ":" in address else address
        leaving = "deletionTimestamp" in found.get("metadata", {})
        reason = "its pod is being deleted" if leaving else ""
        return Observed("running", f"http://{host}:{PORT}", reason=reason, segments=segments)
    return Observed("pending", reason=_waits_for(status, state), segments=segments)


def label(text: str) -> str:
    """Make a label's value: at most 63 letters, digits, hyphens, underscores and dots."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")


def amount(quantity: str | int | float) -> float:
    """Read a Kubernetes quantity, such as 500m, 4Gi or 3920."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", str(quantity))
    if match is None or match[2] not in _UNITS:
        return 0.0
    return float(match[1]) * _UNITS[match[2]]


_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}
# For tensors between the processes of a replica. Counts as the pod's memory.
_SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}


def _container(spec: ReplicaSpec, config: KubernetesConfig, name: str) -> Object:
    wanted: dict[str, str] = {}
    if spec.resources.cpus is not None:
        wanted["cpu"] = str(spec.resources.cpus)  # as a limit too: the server's threads follow the quota
    if spec.resources.memory is not None:
        wanted["memory"] = f"{math.ceil(spec.resources.memory * 1024)}Mi"
    if spec.resources.gpus:
        wanted[config.gpu_resource] = str(spec.resources.gpus)
    # Kubernetes reads $(NAME) in arguments; $$( is a literal one.
    arguments = [one.replace("$(", "$$(") for one in (spec.source, *spec.flags)]
    own = ["--host=0.0.0.0", f"--port={PORT}", "--state-dir=/state/replica"]
    return {
        "name": "server",
        "image": config.image,
        "imagePullPolicy": config.pull_policy,
        "args": ["serve", *arguments, *own],
        "env": [{"name": MARK, "value": spec.mark}],
        "envFrom": [{"secretRef": {"name": name}}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"requests": wanted, "limits": wanted} if wanted else {},
        # For disruption budgets. The controller asks the server itself.
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "state", "mountPath": "/state"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _cache(config: KubernetesConfig) -> Object:
    if config.cache_claim:
        return {"name": "cache", "persistentVolumeClaim": {"claimName": config.cache_claim}}
    return {"name": "cache", "emptyDir": {"sizeLimit": f"{math.ceil(config.cache_gib * 1024)}Mi"}}


def _toleration(text: str) -> Object:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    found: Object = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        found["value"] = value
    if effect:
        found["effect"] = effect
    return found


def _node_lost(status: Object) -> str:
    if status.get("phase") == "Unknown" or status.get("reason") == "NodeLost":
        return _sentence("NodeLost", status.get("message", ""))
    for condition in status.get("conditions", []):
        disrupted = condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        if disrupted and condition.get("reason") == "DeletionByTaintManager":
            return _sentence("NodeLost", condition.get("message", ""))
    return ""


def _waits_for(status: Object, state: Object) -> str:
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _sentence(condition.get("reason", "Unschedulable"), condition.get("message", ""))
    waiting = state.get("waiting")
    if waiting:
        return _sentence(waiting.get("reason", "Waiting"), waiting.get("message", ""))
    return "it has no node yet"


def _segments(found: Object, state: Object) -> dict[str, float]:
    """Seconds until a node was found, and from then until the container ran. The API gives whole seconds."""
    conditions = {one.get("type"): one for one in found.get("status", {}).get("conditions", [])}
    scheduled = conditions.get("PodScheduled", {})
    created = _time(found.get("metadata", {}).get("creationTimestamp"))
    placed = _time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None
    began = _time((state.get("running") or state.get("terminated") or {}).get("startedAt"))
    segments = {}
    if created is not None and placed is not None:
        segments["node"] = max(placed - created, 0.0)
        if began is not None:
            segments["image"] = max(began - placed, 0.0)
    return segments


def _time(text: str | None) -> float | None:
    return None if not text else datetime.fromisoformat(text).timestamp()


def _sentence(reason: str, message: str) -> str:
    return f"{reason}: {message.strip()[:400]}" if message else reason
