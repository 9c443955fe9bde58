"""Writes the option tables of docs/commands.md from the configs: `python -m ridgeline.cli.reference`.

A table stands between `<!-- options: NAME -->` and `<!-- end -->`; everything else in the page is by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ridgeline.cli.sampling import Sampling
from ridgeline.engine.config import EngineConfig
from ridgeline.gateway.gateway_config import GatewayConfig
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.bench.sweeps.options import SweepOptions
from ridgeline.lab.plan.options import PlanOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.options import markdown_table
from ridgeline.server.config import ServerConfig

TABLES = {
    "server": markdown_table(ServerConfig),
    "engine": markdown_table(EngineConfig, skip=("model",)),
    "gateway": markdown_table(GatewayConfig),
    "sampling": markdown_table(Sampling),
    "bench": markdown_table(BenchOptions),
    "plan": markdown_table(PlanOptions),
    "traffic": markdown_table(TrafficOptions),
    "sweep": markdown_table(SweepOptions),
}
_PLACE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table as the code has it now."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]}\n{found[3]}", page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or ["docs/commands.md"]):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
