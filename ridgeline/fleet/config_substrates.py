"""The [substrate] table of fleet.toml, and a table for each kind: [substrate.local], .ray, .kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ridgeline.options import OptionError, check_range, option

T = TypeVar("T")

Kind = Literal["local", "ray", "kubernetes"]


@dataclass(frozen=True, slots=True)
class SubstrateConfig:
    kind: Kind = option("local", "where replicas run: processes of this machine, Ray, or Kubernetes")


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """[substrate.local]"""

    cpus: int | None = option(
        None,
        "CPUs for all replicas: one that names its cpus starts only while they suffice, the others share the "
        "rest; default: the machine's, without a limit",
    )
    memory: float | None = option(
        None,
        "GiB for all replicas: one that names its memory starts only while it fits; default: the machine's",
    )
    gpus: tuple[str, ...] = option((), "indices of the GPUs that replicas may use")
    separate_caches: bool = option(
        False, "give each replica a separate, empty cache, as on separate machines; removed at its end"
    )

    def __post_init__(self) -> None:
        check_range(self, "[substrate.local]", 1, 65_536, "cpus")
        check_range(self, "[substrate.local]", 0.01, 1 << 20, "memory")


@dataclass(frozen=True, slots=True)
class RayConfig:
    """[substrate.ray]"""

    address: str | None = option(
        None, "address of a Ray cluster, or auto; default: start one, which ends with the controller"
    )
    namespace: str = option("ridgeline", "Ray namespace of the replicas' actors")
    resources: tuple[str, ...] = option(
        (), "custom resources of each replica, as NAME=AMOUNT, such as accelerator_type:H200=0.001"
    )
    cpus: int | None = option(
        None, "CPUs of a Ray cluster that the controller starts; default: the machine's"
    )

    def __post_init__(self) -> None:
        check_range(self, "[substrate.ray]", 1, 65_536, "cpus")
        pairs(self.resources, "[substrate.ray] resources", float)


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """[substrate.kubernetes]"""

    namespace: str | None = option(
        None, "namespace of the replicas' pods; default: the controller's own, or default"
    )
    image: str = option("ridgeline:latest", "image of the replicas' pods")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = option(
        "IfNotPresent", "when a node pulls the image"
    )
    pull_secrets: tuple[str, ...] = option((), "names of Secrets for pulling the image")
    api: str | None = option(
        None, "URL of the Kubernetes API, such as that of `kubectl proxy`; default: that of the pod's cluster"
    )
    token_file: Path | None = option(None, "file with the API's token; default: that of the pod's account")
    ca_file: Path | None = option(None, "PEM file of the API's CA; default: that of the pod's account")
    service_account: str = option(
        "default", "service account of the replicas' pods; its token is not mounted"
    )
    node_selector: tuple[str, ...] = option((), "labels that nodes must have, as NAME=VALUE")
    tolerations: tuple[str, ...] = option((), "tolerated taints, as KEY, KEY:EFFECT or KEY=VALUE:EFFECT")
    gpu_resource: str = option("nvidia.com/gpu", "name of the resource that counts GPUs")
    runtime_class: str | None = option(None, "runtime class of the pods, such as nvidia")
    priority_class: str | None = option(None, "priority class of the pods")
    cache_claim: str | None = option(
        None, "PersistentVolumeClaim for models and packed weights, writable by several pods; default: none"
    )
    cache_gib: float = option(20.0, "without cache_claim: GiB of a pod's own cache, on its node's disk")

    def __post_init__(self) -> None:
        check_range(self, "[substrate.kubernetes]", 0.1, 1 << 20, "cache_gib")
        pairs(self.node_selector, "[substrate.kubernetes] node_selector", str)


def pairs(texts: tuple[str, ...], where: str, kind: Callable[[str], T]) -> dict[str, T]:
    """NAME=VALUE texts as a dict."""
    found: dict[str, T] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            if not name or not separator:
                raise ValueError
            found[name] = kind(value)
        except ValueError:
            raise OptionError(f"{where}: {text!r} is not NAME=VALUE") from None
    return found


SUBSTRATES: Mapping[str, type] = {"local": LocalConfig, "ray": RayConfig, "kubernetes": KubernetesConfig}
