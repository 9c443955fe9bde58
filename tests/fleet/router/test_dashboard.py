"""deploy/grafana/fleet.json asks for metrics and labels that routers and the controller have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from ridgeline.fleet.controller.api.metrics import metrics_text as controller_page
from ridgeline.fleet.controller.api.status import FleetStatus, ModelStatus, replica_status
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.router.observe.metrics import metrics_text as router_page
from ridgeline.fleet.substrates.substrate import Capacity
from ridgeline.replica.messages import Started, WeightsFrom
from tests.fleet.router.conftest import Stage
from tests.fleet.router.scripted_replica import MODEL

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy" / "grafana" / "fleet.json"


def labels_of(page: str) -> dict[str, set[str]]:
    """By the names of samples, as prometheus_client's own parser reads the page."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def controllers() -> str:
    weights = WeightsFrom("peer chat-1", 1 << 20, 1.0, 1e9)
    replica = Replica("chat-2", "chat", "v1", 0.0)
    replica.hear(Started("e", 1, "m", ("m",), "v1", 4, 64, 16, {"import": 1.0}, weights=weights), 1.0)
    model = ModelStatus("chat", 1, 1, 0, "v1", False, "", "", "", "", "", False, "")
    shown = (replica_status(replica, 2.0),)
    return controller_page(
        FleetStatus("f", "u", 1, 1.0, 1, 1, False, 1, 1, (model,), shown, Capacity(8.0, 31.0, 2))
    )


async def test_every_panel_asks_for_what_a_page_has(stage: Stage) -> None:
    await stage.add(1, region="eu")
    router = await stage.router(region="eu")
    router.books[MODEL].moves["died"] += 1
    journal = SimpleNamespace(
        waiting=tuple, oldest_s=float, answers=0, size=0, appended=0, recovered=0
    )  # of a durable queue
    there = labels_of(router_page(router, cast(Any, journal), "router-0")) | labels_of(controllers())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(r"ridgeline_\w+", expression)
        assert names
        for name in names:
            assert name in there, expression
            for group in re.findall(r"by \(([^)]*)\)", expression):
                assert set(group.split(", ")) <= there[name], expression
        assert re.findall(r"rate\((\w+)", expression) == [
            name for name in names if name.endswith(("_total", "_bucket"))
        ], f"a rate of each counter and of nothing else: {expression}"
    for panel in panels:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {
                name for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(", ")
            }
            assert shown == kept - {"le"}, target
