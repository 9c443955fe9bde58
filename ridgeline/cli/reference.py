"""Writes the option tables of docs/commands.md from the configs: `python -m ridgeline.cli.reference`.

A table is between `<!-- options: NAME -->` and `<!-- end -->`; the rest of the page is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ridgeline.cli.flags.alias_table import ALIASES, IGNORED, REFUSED, Alias
from ridgeline.cli.sampling import Sampling
from ridgeline.engine.config import EngineConfig
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.bench.sweeps.options import SweepOptions
from ridgeline.lab.plan.options import PlanOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import markdown_table
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
    "sampling": markdown_table(Sampling),
    "bench": markdown_table(BenchOptions),
    "plan": markdown_table(PlanOptions),
    "traffic": markdown_table(TrafficOptions),
    "sweep": markdown_table(SweepOptions),
    "aliases": alias_table(),
    "ignored": ignored_table(),
    "refused": refused_table(),
}
_PLACE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table generated from the current code."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]}\n{found[3]}", page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or ["docs/commands.md"]):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
