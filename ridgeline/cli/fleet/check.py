"""`ridgeline fleet check`, and the checks that `up` and `roll` share with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli.parsing import Verbs, add_verb, path_argument
from ridgeline.fleet.config import FleetSettings, read_fleet
from ridgeline.fleet.config_models import FleetModel
from ridgeline.options import OptionError, build, by_name, check_values, nearest, options_of
from ridgeline.replica.weight_sources import shown

DESCRIPTION = """\
Check fleet.toml and print what it would run, without starting anything. Checks every key, the options of
`ridgeline serve` below [models.serve], the budgets, and settings that contradict each other."""

EXAMPLES = """\
  ridgeline fleet check fleet.toml
"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "check", "check fleet.toml", DESCRIPTION, EXAMPLES)
    parser.add_argument("file", type=path_argument, metavar="FILE", help="fleet.toml")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_checked(args.file)
    for model in settings.models:
        scaling = f"{model.scaling.min} to {model.scaling.max} replicas" if model.scales else "not scaled"
        print(f"{model.name}: {model.model.replicas} × {model.source}, {scaling}, version {model.version}")
        print(f"  {cost_text(model)}")
        print(f"  weights from {', '.join(map(shown, model.weights.sources))}")
    for warning in warnings(settings):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{args.file}: the configuration is valid")
    return 0


def cost_text(model: FleetModel) -> str:
    """The cost of its replicas at the start. The file does not name a currency."""
    count, price = model.model.replicas, model.resources.price
    return (
        f"cost {count * price:g} per hour, in the currency of [models.resources] price: "
        f"{count} {'replica' if count == 1 else 'replicas'} at {price:g}"
    )


def read_checked(path: Path, flags: Mapping[str, Any] | None = None) -> FleetSettings:
    """Read fleet.toml and check all that can be checked without starting a replica."""
    settings = read_fleet(path, flags)
    for model in settings.models:
        check_serve(model.serve, f"{path}: [[models]] {model.name}: [models.serve] ")
    return settings


def check_serve(values: Mapping[str, Any], where: str) -> None:
    """Raise OptionError for options that `ridgeline serve` would refuse, with the nearest option."""
    from ridgeline.engine.config import EngineConfig
    from ridgeline.server.config import ServerConfig

    known = {kind: {one.name for one in options_of(kind)} for kind in (ServerConfig, EngineConfig)}
    for kind, names in known.items():
        mine = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in by_name(kind, values, where).items()
            if name in names
        }
        build(kind, check_values(kind, mine, where))
    names = set().union(*known.values())
    aliases = {one.alias for kind in known for one in options_of(kind) if one.alias}
    for name in values:
        if name not in names | aliases:
            raise OptionError(
                f"{where}unknown option {name!r} of `ridgeline serve`{nearest(name, sorted(names))}"
            )


def warnings(settings: FleetSettings) -> list[str]:
    found = []
    fleet = settings.fleet
    from ridgeline.web.hosts import is_loopback

    if not is_loopback(fleet.host) and not fleet.api_keys and fleet.api_key_file is None:
        found.append(
            f"[fleet] host is {fleet.host} and there are no api_keys: every machine that reaches it may use "
            "the fleet"
        )
    for model in settings.models:
        scaling = model.scaling
        if model.scales and scaling.min == 0 and scaling.ttft_slo_ms is not None:
            found.append(
                f"{model.name}: with min = 0, the first request after a pause waits for a replica to start; "
                f"a first token within {scaling.ttft_slo_ms:g} ms needs min = 1 unless traffic is steady"
            )
        if model.scales and scaling.min == 0 and model.limits.cold_s < 30:
            found.append(
                f"{model.name}: cold_s is {model.limits.cold_s:g} s: requests may fail before a start ends"
            )
        if fleet.drain_s < 5:
            found.append(f"drain_s is {fleet.drain_s:g} s: longer answers move to another replica or fail")
    return found
