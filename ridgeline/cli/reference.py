"""Writes the tables of the pages in PAGES: `python -m ridgeline.cli.reference`.

Options come from the configs, families and formats from `models.support`. A table is between
`<!-- options: NAME -->` and `<!-- end -->`; the rest of a page is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ridgeline.cli.flags.alias_table import ALIASES, IGNORED, REFUSED, Alias
from ridgeline.cli.sampling import Sampling
from ridgeline.engine.config import EngineConfig
from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.config_models import TABLES as MODEL_TABLES
from ridgeline.fleet.config_models import ModelConfig, PlaceConfig
from ridgeline.fleet.config_substrates import SUBSTRATES, SubstrateConfig
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.bench.sweeps.options import SweepOptions
from ridgeline.lab.evaluate.options import EvaluateOptions, GateOptions
from ridgeline.lab.plan.options import PlanOptions
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.lab.train_drafter.options import TrainOptions
from ridgeline.models import support
from ridgeline.options import markdown_table, options_of
from ridgeline.server.config import ServerConfig


def alias_table() -> str:
    rows = [
        f"| {_codes(row.flags)} | {row.tool} | `{_ours(row)}` | {row.remark} |"
        for row in sorted(ALIASES, key=lambda row: row.tool)
    ]
    return "\n".join(["| flag | of | same as | remark |", "|---|---|---|---|", *rows])


def ignored_table() -> str:
    rows = [
        f"| {_codes(row.flags)} | {row.tool} | {row.why}{'; ' * bool(row.otherwise)}{row.otherwise} |"
        for row in IGNORED
    ]
    return "\n".join(["| flag | of | why it is ignored |", "|---|---|---|", *rows])


def refused_table() -> str:
    rows = [f"| {_codes(row.flags)} | {row.tool} | {row.instead} |" for row in REFUSED]
    return "\n".join(["| flag | of | instead |", "|---|---|---|", *rows])


def markdown(rows: list[list[str]]) -> str:
    """Rows as a Markdown table; the first one is its head."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def key_table(config: type) -> str:
    """The keys of a table in a file: name, default, meaning."""
    rows = [
        [f"`{one.name}`", "" if one.default in (None, (), "") else f"`{_written(one.default)}`", one.doc]
        for one in options_of(config)
    ]
    return markdown([["key", "default", "meaning"], *rows])


def _written(default: object) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _codes(flags: tuple[str, ...]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _ours(row: Alias) -> str:
    flag = row.option.rpartition(".")[2].replace("_", "-")
    if isinstance(row.const, str):
        return f"--{flag} {row.const}"
    return f"--no-{flag}" if row.const is False else f"--{flag}"


TABLES = {
    "server": markdown_table(ServerConfig),
    "engine": markdown_table(EngineConfig, skip=("model",)),
    "gateway": markdown_table(GatewayConfig),
    "fleet": markdown_table(FleetConfig),
    "sampling": markdown_table(Sampling),
    "bench": markdown_table(BenchOptions),
    "plan": markdown_table(PlanOptions),
    "traffic": markdown_table(TrafficOptions),
    "sweep": markdown_table(SweepOptions),
    "evaluate": markdown_table(EvaluateOptions),
    "gate": markdown_table(GateOptions),
    "quantize": markdown_table(QuantizeOptions),
    "train_drafter": markdown_table(TrainOptions),
    "aliases": alias_table(),
    "ignored": ignored_table(),
    "refused": refused_table(),
}
SUPPORT_TABLES = {
    "families": markdown(support.family_rows()),
    "formats": markdown(support.format_rows()),
    "inputs": markdown(support.input_rows()),
    "weights": markdown(support.weights_rows()),
}
FLEET_TABLES = {
    "fleet_file": key_table(FleetConfig),
    "models": key_table(ModelConfig),
    **{f"model_{name}": key_table(config) for name, config in MODEL_TABLES.items()},
    "places": key_table(PlaceConfig),
    "substrate": key_table(SubstrateConfig),
    **{f"substrate_{name}": key_table(config) for name, config in SUBSTRATES.items()},
}
ALL_TABLES = TABLES | SUPPORT_TABLES | FLEET_TABLES
PAGES = ("docs/commands.md", "docs/supported-models.md", "docs/fleet.md")
_PLACE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table generated from the current code."""
    return _PLACE.sub(lambda found: f"{found[1]}{ALL_TABLES[found[2]]}\n{found[3]}", page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or PAGES):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
