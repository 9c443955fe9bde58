"""pools.toml: capacity pools, latencies between users and regions, and the models to place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ridgeline.fleet.placement.regions import UNKNOWN_MS, allows, between
from ridgeline.options import (
    OptionError,
    build,
    check_range,
    check_values,
    list_of_tables,
    nearest,
    option,
    read_toml,
)

Kind = Literal["reserved", "on-demand", "spot"]


@dataclass(frozen=True, slots=True)
class Pool:
    """[[pools]]: GPUs of one kind, from one provider, in one region."""

    name: str = option("", "name, used once")
    provider: str = option("", "company or cluster that owns the GPUs")
    region: str = option("", "region, as in residency and [latency]")
    gpu: str = option("", "kind of GPU, such as h100")
    price: float = option(0.0, "price of one GPU for one hour, in $")
    kind: Kind = option("on-demand", "reserved, on-demand or spot")
    quota: int = option(0, "largest number of GPUs to use")
    failed: bool = option(False, "the pool is down: place nothing there")

    def __post_init__(self) -> None:
        check_range(self, f"[[pools]] {self.name}:", 0, 1e6, "price", "quota")


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """[[models]]: replicas to place, and their rules."""

    name: str = option("", "name, used once")
    replicas: int = option(1, "replicas to place")
    gpus: int = option(1, "GPUs of each replica, all in one pool")
    gpu: tuple[str, ...] = option((), "kinds of GPU that the model may use; empty: all")
    residency: tuple[str, ...] = option((), "regions that the model may run in, with * for parts; empty: all")
    max_latency_ms: float | None = option(None, "largest mean latency between its users and a region, in ms")
    min_regions: int = option(1, "fewest regions to spread the replicas over")
    min_pools: int = option(1, "fewest pools to spread the replicas over")
    max_spot_share: float = option(1.0, "largest share of the replicas in spot pools")
    users: Mapping[str, float] = field(default_factory=dict)  # [models.users]: place → share

    def __post_init__(self) -> None:
        where = f"[[models]] {self.name}:"
        check_range(self, where, 0, 100_000, "replicas")
        check_range(self, where, 1, 1024, "gpus", "min_regions", "min_pools")
        check_range(self, where, 0, 1, "max_spot_share")
        check_range(self, where, 0, 1e6, "max_latency_ms")

    def may_run_in(self, region: str) -> bool:
        return allows(self.residency, region)


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """[placement]: the price of latency."""

    latency_price: float = option(
        0.01, "extra $ per hour that a replica may cost for each ms nearer to its users"
    )
    unknown_ms: float = option(
        UNKNOWN_MS, "latency in ms between a place and a region that [latency] does not name"
    )

    def __post_init__(self) -> None:
        check_range(self, "[placement]", 0, 1e6, "latency_price", "unknown_ms")


@dataclass(frozen=True, slots=True)
class PoolsFile:
    pools: tuple[Pool, ...]
    models: tuple[PlacedModel, ...]
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # place → region → ms
    config: PlacementConfig = field(default_factory=PlacementConfig)

    def latency(self, model: PlacedModel, region: str) -> float:
        """Mean latency over the model's users in ms; 0 if it names none."""
        total = sum(model.users.values())
        if not total:
            return 0.0
        return sum(share * self.between(place, region) for place, share in model.users.items()) / total

    def between(self, place: str, region: str) -> float:
        return between(self.latency_ms, place, region, self.config.unknown_ms)


def read_pools(path: Path, needs_models: bool = True) -> PoolsFile:
    """Read pools.toml. An OptionError says which key is wrong. needs_models: false if they are optional."""
    return make_pools(read_toml(path), f"{path}: ", needs_models)


def make_pools(document: Mapping[str, Any], where: str = "", needs_models: bool = True) -> PoolsFile:
    known = ("pools", "models", "latency", "placement")
    for section in document:
        if section not in known:
            raise OptionError(f"{where}unknown section [{section}]{nearest(section, known)}")
    pools = tuple(
        build(Pool, check_values(Pool, table, f"{where}[[pools]] {number} "))
        for number, table in enumerate(_tables(document, "pools", where), 1)
    )
    placed = _tables(document, "models", where) if needs_models or "models" in document else []
    models = tuple(_model(table, f"{where}[[models]] {number} ") for number, table in enumerate(placed, 1))
    for kind, names in (
        ("pools", [pool.name for pool in pools]),
        ("models", [model.name for model in models]),
    ):
        for name in names:
            if not name:
                raise OptionError(f"{where}[[{kind}]]: an entry has no name")
            if names.count(name) > 1:
                raise OptionError(f"{where}[[{kind}]]: the name {name!r} is used twice")
    for pool in pools:
        if not pool.region or not pool.gpu:
            raise OptionError(f"{where}[[pools]] {pool.name}: set region and gpu")
    config = build(PlacementConfig, check_values(PlacementConfig, document.get("placement", {}), where))
    return PoolsFile(pools, models, read_latencies(document.get("latency", {}), where), config)


def _model(table: Mapping[str, Any], where: str) -> PlacedModel:
    own = {key: value for key, value in table.items() if key != "users"}
    users = _numbers(table.get("users", {}), f"{where}[models.users]")
    return build(PlacedModel, {**check_values(_OwnKeys, own, where), "users": users})


@dataclass(frozen=True, slots=True)
class _OwnKeys:
    """The keys of PlacedModel; [models.users] is a separate table."""

    name: str = ""
    replicas: int = 1
    gpus: int = 1
    gpu: tuple[str, ...] = ()
    residency: tuple[str, ...] = ()
    max_latency_ms: float | None = None
    min_regions: int = 1
    min_pools: int = 1
    max_spot_share: float = 1.0


def read_latencies(table: Any, where: str) -> dict[str, dict[str, float]]:
    """[latency.PLACE]: milliseconds to each region."""
    if not isinstance(table, dict):
        raise OptionError(f"{where}latency must be tables: write [latency.PLACE] above its regions")
    return {place: _numbers(regions, f"{where}[latency.{place}]") for place, regions in table.items()}


def _numbers(table: Any, where: str) -> dict[str, float]:
    if not isinstance(table, dict):
        raise OptionError(f"{where} must be a table")
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise OptionError(f"{where} {key} must be a number of 0 or more, got {value!r}")
    return {key: float(value) for key, value in table.items()}


def _tables(document: Mapping[str, Any], section: str, where: str) -> list[dict[str, Any]]:
    tables = list_of_tables(document.get(section, []), section, where)
    if not tables:
        raise OptionError(f"{where}[[{section}]] is missing: add one for each")
    return tables
