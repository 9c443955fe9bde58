"""The [substrate] table of fleet.toml, and a table for each kind: [substrate.local], .ray, .kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ridgeline.options import check_range, option

Kind = Literal["local", "ray", "kubernetes"]


@dataclass(frozen=True, slots=True)
class SubstrateConfig:
    kind: Kind = option("local", "where replicas run: processes of this machine, Ray, or Kubernetes")


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """[substrate.local]"""

    cpus: int | None = option(None, "threads for all replicas together; default: the machine's")
    memory: float | None = option(None, "GiB for all replicas together; default: the machine's")
    gpus: tuple[str, ...] = option((), "indices of the GPUs that replicas may use")

    def __post_init__(self) -> None:
        check_range(self, "[substrate.local]", 1, 65_536, "cpus")
        check_range(self, "[substrate.local]", 0.01, 1 << 20, "memory")


@dataclass(frozen=True, slots=True)
class RayConfig:
    """[substrate.ray]"""

    address: str | None = option(None, "address of a Ray cluster; default: start one on this machine")
    namespace: str = option("ridgeline", "Ray namespace of the replicas' actors")


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """[substrate.kubernetes]"""

    namespace: str = option("default", "namespace of the replicas' pods")
    image: str = option("ridgeline:latest", "image of the replicas' pods")


SUBSTRATES: Mapping[str, type] = {"local": LocalConfig, "ray": RayConfig, "kubernetes": KubernetesConfig}
