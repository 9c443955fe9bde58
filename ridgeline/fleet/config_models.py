"""The [[models]] tables of fleet.toml: what replicas of a model run, and how they are scaled and rolled out.

Imports nothing heavy. `config.py` reads the file and checks its parts against each other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ridgeline.options import OptionError, check_range, option
from ridgeline.replica import weight_sources

Policy = Literal["default", "round-robin", "least-loaded", "prefix", "lora", "sticky"]
ServeValue: TypeAlias = str | int | float | bool | tuple[str, ...]
DAY_S = 86_400
# Settings of a server that the fleet chooses itself.
FLEET_SETS = (
    *("host", "port", "state_dir", "api_keys", "api_key_file", "served_model_name", "model", "names"),
    *(
        "weight_sources",
        "weight_peers",
        "weight_caches",
        "share_weights",
        "share_transfers",
        "share_mb_per_s",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys of a [[models]] table itself."""

    name: str = option("", "name that clients ask for")
    source: str = option("", "MODEL of `ridgeline serve`: short name, folder, file or hub id; default: name")
    aliases: tuple[str, ...] = option((), "further names that clients may ask for")
    replicas: int = option(1, "replicas at the start; afterwards between [models.scaling] min and max")
    policy: Policy = option("default", "how a request's replica is chosen")
    residency: tuple[str, ...] = option(
        (), "regions in which its requests may be computed, with * for parts of a name; default: all"
    )

    def __post_init__(self) -> None:
        check_range(self, f"[[models]] {self.name}:", 0, 10_000, "replicas")


@dataclass(frozen=True, slots=True)
class ResourcesConfig:
    """[models.resources]: what one replica uses and costs."""

    cpus: int | None = option(
        None, "threads of one replica; default: on this machine an equal share of those that the others leave"
    )
    memory: float | None = option(
        None, "GiB of memory that one replica needs: it starts only where they are free; default: not counted"
    )
    gpus: int = option(0, "GPUs of one replica")
    price: float = option(
        1.0, "price of one replica per hour, in any currency; with 1, a budget is a number of replicas"
    )
    pool: str = option("", "capacity pool in which the replicas run; default: any")
    region: str = option("", "region in which the replicas run; default: any. Several: [[models.places]]")

    def __post_init__(self) -> None:
        check_range(self, "[models.resources]", 1, 4096, "cpus")
        check_range(self, "[models.resources]", 0.01, 1 << 20, "memory")
        check_range(self, "[models.resources]", 0, 1024, "gpus")
        check_range(self, "[models.resources]", 0.000001, 1e9, "price")


@dataclass(frozen=True, slots=True)
class PlaceConfig:
    """[[models.places]]: regions and pools over which the replicas are spread."""

    region: str = option("", "region, as [latency] and residency name it")
    pool: str = option("", "capacity pool in that region; default: any")
    weight: float = option(1.0, "its share of the replicas, relative to the other places")

    def __post_init__(self) -> None:
        check_range(self, "[[models.places]]", 0.001, 1e6, "weight")

    @property
    def key(self) -> tuple[str, str]:
        return (self.region, self.pool)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[models.limits]: limits on the requests that wait at a router."""

    max_held: int = option(1024, "requests that may wait at each router; further ones get 429")
    hold_s: float = option(30.0, "longest wait in seconds while every replica is saturated; then 429")
    cold_s: float = option(300.0, "longest wait in seconds while no replica is ready; then 503")
    durable: bool | None = option(
        None,
        "journal requests with a key that arrive while no replica is ready; default: true where "
        "[models.scaling] min is 0",
    )

    def __post_init__(self) -> None:
        check_range(self, "[models.limits]", 0, 1_000_000, "max_held")
        check_range(self, "[models.limits]", 0, DAY_S, "hold_s", "cold_s")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """[models.scaling]: without this table, the autoscaler leaves the number of replicas alone."""

    min: int = option(1, "fewest replicas; 0: scale to zero when no request arrives")
    max: int = option(1, "most replicas")
    window_s: float = option(60.0, "seconds of demand and load that a decision looks at")
    scale_up_delay_s: float = option(0.0, "seconds for which more replicas must be needed before one starts")
    scale_down_delay_s: float = option(
        300.0, "seconds for which fewer replicas must be needed before one stops"
    )
    target: float = option(0.7, "wanted load of a replica, as a share of its capacity in tokens and KV")
    budget: float | None = option(
        None, "hard limit on the cost of the replicas per hour, in the currency of price"
    )
    ttft_slo_ms: float | None = option(
        None, "wanted time to first token; `fleet check` warns where scaling cannot keep it"
    )
    replica_requests_per_s: float | None = option(
        None, "requests/s of one replica; default: measured on replicas with requests waiting"
    )
    replica_tokens_per_s: float | None = option(
        None, "prompt and output tokens/s of one replica; default: measured on replicas with requests waiting"
    )
    stale_s: float = option(15.0, "ignore reports of load and demand that are older than this many seconds")

    def __post_init__(self) -> None:
        check_range(self, "[models.scaling]", 0, 10_000, "min", "max")
        check_range(self, "[models.scaling]", 1, DAY_S, "window_s")
        check_range(self, "[models.scaling]", 0, DAY_S, "scale_up_delay_s", "scale_down_delay_s")
        check_range(self, "[models.scaling]", 0.05, 1.0, "target")
        check_range(self, "[models.scaling]", 0, 1e12, "budget")
        check_range(self, "[models.scaling]", 1e-6, 1e12, "replica_requests_per_s", "replica_tokens_per_s")
        check_range(self, "[models.scaling]", 1, DAY_S, "stale_s")
        if self.min > self.max:
            raise OptionError(f"[models.scaling] min is {self.min}, which is more than max ({self.max})")


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """[models.rollout]: how replicas of a new version take over."""

    surge: int = option(1, "replicas of the new version that may run beyond the wanted number")
    unavailable: int = option(0, "replicas that may be missing from the wanted number during a rollout")
    canary: float = option(
        0.1,
        "share of all requests that the first new replica gets until it is judged, at most as many as "
        "another replica; 1: no canary",
    )
    canary_s: float = option(30.0, "shortest time to watch the canary, in seconds")
    canary_requests: int = option(20, "requests after which the canary may be judged")
    judge_s: float = option(
        600.0, "longest wait for those requests, in seconds; then fewer decide, or a probe"
    )
    error_rate: float = option(0.02, "roll back if the new version's error rate is this much above the old")
    latency_ratio: float = option(
        2.0, "roll back if the new version's p90 time to first token is this multiple of the old one's"
    )
    start_s: float = option(900.0, "roll back if no new replica is ready after this many seconds")

    def __post_init__(self) -> None:
        check_range(self, "[models.rollout]", 0, 1000, "surge", "unavailable")
        check_range(self, "[models.rollout]", 0.001, 1, "canary")
        check_range(self, "[models.rollout]", 0, DAY_S, "canary_s", "judge_s", "start_s")
        check_range(self, "[models.rollout]", 0, 1_000_000, "canary_requests")
        check_range(self, "[models.rollout]", 0, 1, "error_rate")
        check_range(self, "[models.rollout]", 1, 1000, "latency_ratio")
        if self.surge == 0 and self.unavailable == 0:
            raise OptionError(
                "[models.rollout] surge and unavailable are both 0: set one of them to 1 or more"
            )


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """[models.weights]: where a starting replica gets its files from, and what it gives to others."""

    sources: tuple[str, ...] = option(
        weight_sources.DEFAULT,
        "where weights come from, in this order: local, peers, http(s):// or file:// URLs of folders with a "
        "manifest, hub",
    )
    caches: bool = option(True, "also fetch packed weights (CPU) or compiled kernels (GPU) that match")
    transfers: int = option(2, "replicas that may fetch from one replica at a time; others wait or go on")
    mb_per_s: float = option(
        100.0, "MB/s that a replica with running requests gives to all of them; an idle one has no limit"
    )

    def __post_init__(self) -> None:
        weight_sources.check_sources(self.sources, "[models.weights] sources")
        if not self.sources:
            raise OptionError("[models.weights] sources is empty: give at least local and hub")
        check_range(self, "[models.weights]", 1, 1000, "transfers")
        check_range(self, "[models.weights]", 0.1, 1e6, "mb_per_s")

    @property
    def environment(self) -> dict[str, str]:
        """For a replica's server. Not flags: a URL may have a token."""
        return {
            "RIDGELINE_WEIGHT_SOURCES": ",".join(one.replace(",", "%2C") for one in self.sources),
            "RIDGELINE_WEIGHT_CACHES": str(self.caches).lower(),
            "RIDGELINE_SHARE_WEIGHTS": str(weight_sources.PEERS in self.sources).lower(),
            "RIDGELINE_SHARE_TRANSFERS": str(self.transfers),
            "RIDGELINE_SHARE_MB_PER_S": f"{self.mb_per_s:g}",
        }


TABLES: Mapping[str, type] = {
    "resources": ResourcesConfig,
    "weights": WeightsConfig,
    "limits": LimitsConfig,
    "scaling": ScalingConfig,
    "rollout": RolloutConfig,
}


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model of the fleet: its table and the tables below it."""

    model: ModelConfig
    serve: Mapping[str, ServeValue] = field(default_factory=dict)  # options of `ridgeline serve`, by name
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scales: bool = False  # whether fleet.toml has [models.scaling]
    places: tuple[PlaceConfig, ...] = ()  # empty: all at the place of [models.resources]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def source(self) -> str:
        return self.model.source or self.model.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.model.aliases)

    @property
    def slug(self) -> str:
        """The first part of its replicas' ids."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "model"

    @property
    def spread(self) -> tuple[PlaceConfig, ...]:
        """The places of its replicas, at least one."""
        return self.places or (PlaceConfig(self.resources.region, self.resources.pool),)

    @property
    def most(self) -> int:
        """The largest number of replicas within the model's own budget."""
        most = self.scaling.max if self.scales else 10_000
        if self.scaling.budget is not None:
            most = min(most, int(self.scaling.budget / self.resources.price + 1e-9))
        return most

    @property
    def is_durable(self) -> bool:
        """Whether requests that arrive while no replica is ready are journalled."""
        chosen = self.limits.durable
        return self.scales and self.scaling.min == 0 if chosen is None else chosen

    @property
    def version(self) -> str:
        """Fingerprint of what its replicas run. A change of it needs a rollout."""
        runs: dict[str, Any] = {
            "source": self.source,
            "serve": {key: self.serve[key] for key in sorted(self.serve)},
            "cpus": self.resources.cpus,
            "memory": self.resources.memory,
            "gpus": self.resources.gpus,
        }
        return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()[:10]
