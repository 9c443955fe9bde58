"""fleet.toml: reads all tables and checks them against each other.

[fleet], [substrate] with a table for its kind, and a [[models]] table for each model with tables below it.
Unknown keys are errors that name the nearest key. The command line checks the options of `ridgeline serve`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ridgeline.fleet.config_models import (
    DAY_S,
    FLEET_SETS,
    TABLES,
    FleetModel,
    ModelConfig,
    PlaceConfig,
    ServeValue,
)
from ridgeline.fleet.config_substrates import SUBSTRATES, SubstrateConfig
from ridgeline.fleet.placement.pools import read_latencies
from ridgeline.fleet.placement.regions import allows
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
from ridgeline.running import state_home


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The [fleet] table."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8080, "port to listen on; 0 picks a free one")
    grpc_port: int | None = option(None, "also serve gRPC on this port (needs ridgeline[grpc]); default: off")
    routers: int = option(1, "router processes, which share the port")
    region: str = option(
        "", "region of the routers: replicas there are preferred, then those of the nearest region"
    )
    state_dir: Path | None = option(
        None, "directory for state, events, logs and sockets; default: ~/.local/state/ridgeline/fleet"
    )
    api_keys: tuple[str, ...] = option((), "accepted bearer keys; default: no key is needed")
    api_key_file: Path | None = option(None, "file with one accepted key per line; # starts a comment")
    allowed_hosts: tuple[str, ...] = option(
        (), "without keys: host names that clients may use, *.NAME for subdomains, * for any"
    )
    control_host: str | None = option(
        None, "address of the control API over TCP; default: only the socket in state_dir"
    )
    control_port: int = option(8082, "port of the control API over TCP; 0 picks a free one")
    control_token_file: Path | None = option(
        None, "file with the token for control_host; default: control-token in state_dir, made at the start"
    )
    budget: float | None = option(
        None, "hard limit on the cost of all replicas per hour, in the currency of price"
    )
    drain_s: float = option(
        30.0, "seconds that running requests have to finish before a replica or router stops"
    )
    start_s: float = option(900.0, "seconds that a replica has to become ready before it is started again")
    stall_s: float = option(
        30.0, "replace a replica that has requests and makes no step for this many seconds"
    )
    events_kept: int = option(10_000, "events to keep; the oldest are removed")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe level that is logged"
    )
    log_format: Literal["auto", "text", "json"] = option("auto", "auto: text on a terminal, JSON elsewhere")

    def __post_init__(self) -> None:
        check_range(self, "[fleet]", 0, 65_535, "port", "control_port")
        check_range(self, "[fleet]", 1, 65_535, "grpc_port")
        check_range(self, "[fleet]", 1, 256, "routers")
        check_range(self, "[fleet]", 0, 1e12, "budget")
        check_range(self, "[fleet]", 0, DAY_S, "drain_s")
        check_range(self, "[fleet]", 1, DAY_S, "start_s", "stall_s")
        check_range(self, "[fleet]", 100, 10_000_000, "events_kept")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """All settings of the file with defaults, checked against each other."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    substrate: SubstrateConfig = field(default_factory=SubstrateConfig)
    substrate_options: Any = None  # of its kind: LocalConfig, RayConfig or KubernetesConfig
    models: tuple[FleetModel, ...] = ()
    latency_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # [latency.REGION]

    @property
    def state_dir(self) -> Path:
        chosen = self.fleet.state_dir
        return state_home() / "fleet" if chosen is None else chosen.expanduser().absolute()

    def model(self, name: str) -> FleetModel | None:
        """The model with this name or alias; None if there is none."""
        return next((one for one in self.models if name in one.names), None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that clients may use: api_keys, and those of api_key_file."""
        return (*self.fleet.api_keys, *read_keys(self.fleet.api_key_file))


def read_fleet(path: Path, flags: Mapping[str, Any] | None = None) -> FleetSettings:
    """Read the settings of a file; flags override [fleet]. An OptionError says what to change."""
    return make_fleet(read_toml(path), flags, where=f"{path}: ")


def make_fleet(
    document: Mapping[str, Any], flags: Mapping[str, Any] | None = None, where: str = ""
) -> FleetSettings:
    """Build the settings from a parsed document."""
    known = ("fleet", "substrate", "models", "latency")
    for section in document:
        if section not in known:
            raise OptionError(f"{where}unknown section [{section}]{nearest(section, known)}")
    fleet = build(
        FleetConfig,
        check_values(FleetConfig, _table(document, "fleet", where), f"{where}[fleet] "),
        flags or {},
    )
    substrate, options = _substrate(_table(document, "substrate", where), where)
    tables = list_of_tables(document.get("models", []), "models", where)
    models = tuple(_model(table, f"{where}[[models]] {number} ") for number, table in enumerate(tables, 1))
    latencies = read_latencies(document.get("latency", {}), where)
    return _checked(FleetSettings(fleet, substrate, options, models, latencies), where)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """One key per line; # starts a comment."""
    if path is None:
        return ()
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"[fleet] api_key_file: {path} cannot be read: {error.strerror}") from error
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        # An empty file must not open the fleet to every client.
        raise OptionError(f"[fleet] api_key_file: {path} has no key")
    return keys


def _substrate(table: dict[str, Any], where: str) -> tuple[SubstrateConfig, Any]:
    own, below = _split(table, SUBSTRATES, f"{where}[substrate] ", SubstrateConfig)
    config = build(SubstrateConfig, check_values(SubstrateConfig, own, f"{where}[substrate] "))
    options: dict[str, Any] = {
        kind: build(shape, check_values(shape, below.get(kind, {}), f"{where}[substrate.{kind}] "))
        for kind, shape in SUBSTRATES.items()
    }
    return config, options[config.kind]


def _model(table: dict[str, Any], where: str) -> FleetModel:
    places = _places(table.get("places", []), where)
    table = {key: value for key, value in table.items() if key != "places"}
    own, below = _split(table, ("serve", *TABLES), where, ModelConfig)
    model = build(ModelConfig, check_values(ModelConfig, own, where))
    if model.name:
        where = f"{where.rpartition('[[')[0]}[[models]] {model.name}: "
    else:
        raise OptionError(f"{where}has no name: set the name that clients ask for")
    parts: dict[str, Any] = {
        name: build(kind, check_values(kind, below.get(name, {}), f"{where}[models.{name}] "))
        for name, kind in TABLES.items()
    }
    served = serve_options(below.get("serve", {}), where)
    return FleetModel(model, served, **parts, scales="scaling" in below, places=places)


def _places(tables: Any, where: str) -> tuple[PlaceConfig, ...]:
    tables = list_of_tables(tables, "models.places", where)
    where = f"{where}[[models.places]] "
    places = tuple(build(PlaceConfig, check_values(PlaceConfig, table, where)) for table in tables)
    keys = [one.key for one in places]
    for place in places:
        if not place.region:
            raise OptionError(f"{where}has no region")
        if keys.count(place.key) > 1:
            raise OptionError(f"{where}region {place.region!r} and pool {place.pool!r} stand there twice")
    return places


def serve_options(values: Mapping[str, Any], where: str = "") -> dict[str, ServeValue]:
    """Check the values of [models.serve]: each must be one that a flag can have."""
    checked: dict[str, ServeValue] = {}
    for key, value in values.items():
        if key in FLEET_SETS:
            raise OptionError(f"{where}[models.serve] {key} is set by the fleet itself; remove it")
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            checked[key] = tuple(value)
        elif isinstance(value, (str, int, float, bool)):
            checked[key] = value
        else:
            raise OptionError(
                f"{where}[models.serve] {key} must be text, a number, true, false or a list of texts"
            )
    return checked


def _split(
    table: Mapping[str, Any], tables: Mapping[str, type] | tuple[str, ...], where: str, config: type
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A table's own keys, and the tables below it."""
    own = {key: value for key, value in table.items() if key not in tables}
    for key, value in own.items():
        if isinstance(value, dict):
            raise OptionError(f"{where}unknown table {key!r}{nearest(key, tables)}")
    below = {key: value for key, value in table.items() if key in tables}
    for key, value in below.items():
        if not isinstance(value, dict):
            raise OptionError(f"{where}{key} must be a table, not {value!r}")
    return own, below


def _table(document: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise OptionError(f"{where}{section} must be a section: write [{section}] above its keys")
    return table


def _checked(settings: FleetSettings, where: str) -> FleetSettings:
    """The settings, or an OptionError that names the conflict."""
    if not settings.models:
        raise OptionError(f"{where}no model: add a [[models]] table with a name")
    seen: dict[str, str] = {}
    slugs: dict[str, str] = {}
    for model in settings.models:
        for name in model.names:
            if name in seen:
                raise OptionError(f"{where}two models have the name {name!r}: {seen[name]}, {model.name}")
            seen[name] = model.name
        if model.slug in slugs:
            raise OptionError(
                f"{where}the replicas of {slugs[model.slug]!r} and {model.name!r} would have the same ids: "
                "choose names that differ in letters or digits"
            )
        slugs[model.slug] = model.name
        wanted = max(model.model.replicas, model.scaling.min if model.scales else 0)
        if wanted > model.most:
            raise OptionError(
                f"{where}[[models]] {model.name}: {wanted} replicas are more than max and budget allow "
                f"({model.most})"
            )
        if model.scales and model.model.replicas < model.scaling.min:
            raise OptionError(
                f"{where}[[models]] {model.name}: replicas is {model.model.replicas}, less than "
                f"[models.scaling] min ({model.scaling.min})"
            )
        _check_places(model, where)
    cost = sum(model.model.replicas * model.resources.price for model in settings.models)
    if settings.fleet.budget is not None and cost > settings.fleet.budget + 1e-9:
        raise OptionError(
            f"{where}replicas cost {cost:g} per hour, more than [fleet] budget ({settings.fleet.budget:g})"
        )
    _check_supply(settings, where)
    if len(os.fsencode(settings.state_dir)) > 80:
        raise OptionError(
            f"{where}[fleet] state_dir: {settings.state_dir} is longer than 80 bytes: "
            "a longer path leaves no room for the names of its sockets"
        )
    return settings


def _check_supply(settings: FleetSettings, where: str) -> None:
    """On this machine, the replicas at the start fit in what is set for all of them."""
    if settings.substrate.kind != "local":
        return
    for key, unit in (("cpus", "CPUs"), ("memory", "GiB of memory")):
        limit = getattr(settings.substrate_options, key)
        needed = sum(one.model.replicas * (getattr(one.resources, key) or 0) for one in settings.models)
        if limit is not None and needed > limit + 1e-9:
            raise OptionError(
                f"{where}replicas need {needed:g} {unit}, more than [substrate.local] {key} ({limit:g})"
            )


def _check_places(model: FleetModel, where: str) -> None:
    where = f"{where}[[models]] {model.name}: "
    if model.places and (model.resources.region or model.resources.pool):
        raise OptionError(
            f"{where}[models.resources] region and pool are for a model without [[models.places]]"
        )
    rule = model.model.residency
    for place in model.spread:
        if not allows(rule, place.region):
            runs = f"region {place.region!r}" if place.region else "a place without a region"
            raise OptionError(f"{where}residency allows {', '.join(rule)}, but its replicas run in {runs}")
