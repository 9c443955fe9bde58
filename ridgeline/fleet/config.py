"""fleet.toml: reads all tables and checks them against each other.

[fleet], [substrate] with a table for its kind, and a [[models]] table for each model with tables below it.
Unknown keys are errors that name the nearest key. The command line checks the options of `ridgeline serve`.
"""

from __future__ import annotations

import os
import tomllib
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
    ServeValue,
)
from ridgeline.fleet.config_substrates import SUBSTRATES, SubstrateConfig
from ridgeline.options import OptionError, build, check_range, check_values, nearest, option
from ridgeline.running import state_home


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The [fleet] table."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8080, "port to listen on; 0 picks a free one")
    grpc_port: int | None = option(None, "also serve gRPC, on this port; needs ridgeline[grpc]; default: off")
    routers: int = option(1, "router processes, which share the port")
    state_dir: Path | None = option(
        None, "directory for state, events, logs and sockets; default: ~/.local/state/ridgeline/fleet"
    )
    api_keys: tuple[str, ...] = option((), "accepted bearer keys; without any here or in a file, none")
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
        None, "most that all replicas together may cost per hour, in the unit of price: a hard limit"
    )
    drain_s: float = option(30.0, "seconds for running requests to finish before a replica or router ends")
    start_s: float = option(900.0, "seconds for a replica to become ready; then it is started again")
    stall_s: float = option(
        30.0, "a replica with running requests and no step for this many seconds is lost and replaced"
    )
    events_kept: int = option(10_000, "events in the store; the oldest are removed")
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

    @property
    def state_dir(self) -> Path:
        chosen = self.fleet.state_dir
        return state_home() / "fleet" if chosen is None else chosen.expanduser().absolute()

    def model(self, name: str) -> FleetModel | None:
        """By its name or an alias."""
        return next((one for one in self.models if name in one.names), None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that clients may use: those of the file, and those of api_key_file."""
        return (*self.fleet.api_keys, *read_keys(self.fleet.api_key_file))


def read_fleet(path: Path, flags: Mapping[str, Any] | None = None) -> FleetSettings:
    """The file's settings; flags override [fleet]. OptionError says what to change."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: not valid TOML: {error}") from error
    return make_fleet(document, flags, where=f"{path}: ")


def make_fleet(
    document: Mapping[str, Any], flags: Mapping[str, Any] | None = None, where: str = ""
) -> FleetSettings:
    """From a parsed document."""
    known = ("fleet", "substrate", "models")
    for section in document:
        if section not in known:
            raise OptionError(f"{where}unknown section [{section}]{nearest(section, known)}")
    fleet = build(
        FleetConfig,
        check_values(FleetConfig, _table(document, "fleet", where), f"{where}[fleet] "),
        flags or {},
    )
    substrate, options = _substrate(_table(document, "substrate", where), where)
    tables = document.get("models", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise OptionError(f"{where}models is a list: write [[models]] above the keys of each")
    models = tuple(_model(table, f"{where}[[models]] {number} ") for number, table in enumerate(tables, 1))
    return _checked(FleetSettings(fleet, substrate, options, models), where)


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
    own, below = _split(table, ("serve", *TABLES), where, ModelConfig)
    model = build(ModelConfig, check_values(ModelConfig, own, where))
    if model.name:
        where = f"{where.rpartition('[[')[0]}[[models]] {model.name}: "
    else:
        raise OptionError(f"{where}has no name: the one that clients ask for")
    parts: dict[str, Any] = {
        name: build(kind, check_values(kind, below.get(name, {}), f"{where}[models.{name}] "))
        for name, kind in TABLES.items()
    }
    return FleetModel(model, serve_options(below.get("serve", {}), where), **parts, scales="scaling" in below)


def serve_options(values: Mapping[str, Any], where: str = "") -> dict[str, ServeValue]:
    """The values of [models.serve], of which each is one that a flag can have."""
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
            raise OptionError(f"{where}{key} is a table: write its keys below a line of its own")
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
                raise OptionError(
                    f"{where}the name {name!r} stands at two models: {seen[name]}, {model.name}"
                )
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
    cost = sum(model.model.replicas * model.resources.price for model in settings.models)
    if settings.fleet.budget is not None and cost > settings.fleet.budget + 1e-9:
        raise OptionError(
            f"{where}[fleet] budget is {settings.fleet.budget:g}; replicas cost {cost:g} per hour"
        )
    if len(os.fsencode(settings.state_dir)) > 80:
        raise OptionError(
            f"{where}[fleet] state_dir: {settings.state_dir} is too long for the sockets in it (80 bytes)"
        )
    return settings
