"""pools.toml: capacity pools, latencies between users and regions, and the models to place."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ridgeline.options import OptionError, build, check_range, check_values, nearest, option

Kind = Literal["reserved", "on-demand", "spot"]


@dataclass(frozen=True, slots=True)
class Pool:
    """[[pools]]: GPUs of one kind that one provider has in one region."""

    name: str = option("", "name, used once")
    provider: str = option("", "company or cluster that owns the GPUs")
    region: str = option("", "region, as residency rules and latencies name it")
    gpu: str = option("", "kind of GPU, such as h100")
    price: float = option(0.0, "price of one GPU for one hour, in $")
    kind: Kind = option("on-demand", "reserved, on-demand or spot")
    quota: int = option(0, "most GPUs that may be used")
    failed: bool = option(False, "the pool is down: nothing is placed there")

    def __post_init__(self) -> None:
        check_range(self, f"[[pools]] {self.name}:", 0, 1e6, "price", "quota")


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """[[models]]: replicas to place, and the rules that hold for them."""

    name: str = option("", "name, used once")
    replicas: int = option(1, "replicas to place")
    gpus: int = option(1, "GPUs of each replica, all in one pool")
    gpu: tuple[str, ...] = option((), "kinds of GPU that it may use; empty: all")
    residency: tuple[str, ...] = option((), "regions that it may run in, with * for parts; empty: all")
    max_latency_ms: float | None = option(None, "longest way from its users to a region, in the mean")
    min_regions: int = option(1, "regions that it is spread over at least")
    min_pools: int = option(1, "pools that it is spread over at least")
    max_spot_share: float = option(1.0, "share of its replicas that may run in spot pools")
    users: Mapping[str, float] = field(default_factory=dict)  # [models.users]: place → share

    def __post_init__(self) -> None:
        where = f"[[models]] {self.name}:"
        check_range(self, where, 0, 100_000, "replicas")
        check_range(self, where, 1, 1024, "gpus", "min_regions", "min_pools")
        check_range(self, where, 0, 1, "max_spot_share")
        check_range(self, where, 0, 1e6, "max_latency_ms")

    def may_run_in(self, region: str) -> bool:
        return not self.residency or any(fnmatch.fnmatchcase(region, rule) for rule in self.residency)


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """[placement]: what latency is worth."""

    latency_price: float = option(
        0.01, "$ per hour that a replica may cost more to be 1 ms nearer to its users"
    )
    unknown_ms: float = option(150.0, "latency between a place and a region that [latency] does not name")

    def __post_init__(self) -> None:
        check_range(self, "[placement]", 0, 1e6, "latency_price", "unknown_ms")


@dataclass(frozen=True, slots=True)
class PoolsFile:
    pools: tuple[Pool, ...]
    models: tuple[PlacedModel, ...]
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # place → region → ms
    config: PlacementConfig = field(default_factory=PlacementConfig)

    def latency(self, model: PlacedModel, region: str) -> float:
        """In the mean over the model's users; 0 where it names none."""
        total = sum(model.users.values())
        if not total:
            return 0.0
        return sum(share * self.between(place, region) for place, share in model.users.items()) / total

    def between(self, place: str, region: str) -> float:
        known = self.latency_ms.get(place, {})
        return known.get(region, 0.0 if place == region else self.config.unknown_ms)


def read_pools(path: Path) -> PoolsFile:
    """OptionError says which key is wrong and what is allowed."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: not valid TOML: {error}") from error
    return make_pools(document, f"{path}: ")


def make_pools(document: Mapping[str, Any], where: str = "") -> PoolsFile:
    known = ("pools", "models", "latency", "placement")
    for section in document:
        if section not in known:
            raise OptionError(f"{where}unknown section [{section}]{nearest(section, known)}")
    pools = tuple(
        build(Pool, check_values(Pool, table, f"{where}[[pools]] {number} "))
        for number, table in enumerate(_tables(document, "pools", where), 1)
    )
    models = tuple(
        _model(table, f"{where}[[models]] {number} ")
        for number, table in enumerate(_tables(document, "models", where), 1)
    )
    for kind, names in (
        ("pools", [pool.name for pool in pools]),
        ("models", [model.name for model in models]),
    ):
        for name in names:
            if not name:
                raise OptionError(f"{where}[[{kind}]]: one has no name")
            if names.count(name) > 1:
                raise OptionError(f"{where}[[{kind}]]: the name {name!r} is used twice")
    for pool in pools:
        if not pool.region or not pool.gpu:
            raise OptionError(f"{where}[[pools]] {pool.name}: region and gpu are needed")
    config = build(PlacementConfig, check_values(PlacementConfig, document.get("placement", {}), where))
    return PoolsFile(pools, models, _latencies(document.get("latency", {}), where), config)


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


def _latencies(table: Any, where: str) -> dict[str, dict[str, float]]:
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
    tables = document.get(section, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables) or not tables:
        raise OptionError(f"{where}{section} is a list: write [[{section}]] above the keys of each")
    return tables
